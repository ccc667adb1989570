"""Horovod's names for users: what `import hvdlite` offers besides the frameworks' own modules.

Belongs here: functions of the public API that serve every framework. Not here: what they do (`ops/`, `gradients/`,
`job/`).
"""
