"""Configuration: a strict schema, YAML with `extends` and overrides (`load`), cross-field checks (`check`)."""
