"""The ops: public functions on local shards, their gradients, and the choice of a backend."""
