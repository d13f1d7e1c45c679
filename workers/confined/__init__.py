"""User code and models' programs, in processes of their own that the kernel confines."""
