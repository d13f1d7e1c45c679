"""Versioned weights: what a version is, how it is stored, and how a worker follows.

format.py     the format as a specification, and the words everyone here uses
delta.py      one range against its base, compressed; deltas patched into the tensors that they change
encoder.py    the learner's side: each rank encodes what it holds (ShardEncoder)
manifest.py   what one version consists of, as bytes (Manifest)
retention.py  which versions get an anchor, and which versions and blobs are kept
stores.py     where blobs lie: Redis, a directory, an object store, memory (BlobStore)
catchup.py    which manifests lead from one version to another, at the least cost; their blobs, fetched ahead
mirror.py     the worker's side: a safetensors file in shared memory, patched in place (Mirror)
published.py  what a run has published, for people: listed, checked, written as a model's folder
"""
