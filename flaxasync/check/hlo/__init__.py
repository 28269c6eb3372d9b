"""HLO text as data: the reader, the writer, and what can be read from a program without a model of time."""
