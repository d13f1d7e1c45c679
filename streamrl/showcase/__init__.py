"""What `streamrl quickstart` and `streamrl demo` share: a folder of their own, a run, and a report about it."""
