"""The backend "hvdlite" of torch.distributed: process groups over lanes.

    launcher/hvdlite_torch_plugin   registers the backend when torch is imported, and is lazy
    rendezvous                      where the ranks of an MPI job meet, without ports or addresses
    creation                        makes a process group, or uses an idle one of the same ranks again
    process_group                   c10d's operations: what ranks must agree on, and the work on the lane
    reductions                      c10d's reduce operations as hvdlite's
    buffers                         tensors' memory as arrays
    arenas                          DDP's buckets in memory that the ranks of a host share
    work                            the results: waiting, timeouts, futures
    limits                          errors for what works in C++ only
    messages                        send and recv, with tags and from any source

A process group is a `job.groups.Group` that only its members know, with an eager lane. Its calls are numbered: ranks
match them by their order, as torch's users expect. The roll call compares the calls, so that different calls, shapes or
dtypes are a MismatchError on every rank, and the job goes on.
"""
