"""What `all_gather_matmul` is made of: the trips of x, and two orders of work.

Files: `hops` (the trips) and `columns` (tiles of several w), for both; `stream_walk` and `stream`, where x comes tile
by tile from HBM; `resident_plan`, `staircase` and `resident`, where all of it stays in vector memory.
"""
