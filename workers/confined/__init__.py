"""User code and programs of models, in processes of their own that the kernel confines."""
