"""Scripts that train with libraries on top of torch.distributed. `test_libraries` runs them on two ranks."""
