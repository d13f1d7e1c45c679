"""Messages between processes: msgpack maps with a schema and limits, arrays as raw bytes. Nothing executable."""
