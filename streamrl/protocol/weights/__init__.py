"""Versioned weights: what a version is, how it is stored, and how a worker follows.

format.py     the format, as a specification, and the vocabulary of this package
delta.py      patches tensors with deltas, stretch by stretch
encoder.py    the learner's side: each rank encodes the ranges it holds (ShardEncoder)
manifest.py   the contents of one version (Manifest); manifest_bytes.py their bytes, coherence.py what must hold of them
retention.py  which versions get an anchor, and which versions and blobs are kept
stores.py     where blobs are stored: Redis, a directory, an object store, memory (BlobStore)
catchup.py    the cheapest chain of manifests from one version to another
mirror.py     the worker's side: a safetensors file in shared memory, patched in place (Mirror)
published.py  published versions, for people: list them, check them, write them as a model folder
"""
