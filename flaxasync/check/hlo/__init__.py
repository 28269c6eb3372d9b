"""Compiled programs as data: reads and writes HLO text, and answers questions about it.

Nothing in this folder knows about times, and nothing in it imports JAX.

  shapes, module            the data: shapes and layouts, instructions, computations, modules
  source_location           the JAX operation and the line of Python that an instruction came from
  cursor, shape_reader, reader, writer      text to data, and data to text
  trip_count                how often a loop runs
  value_flow                where a value goes
  participants              which devices take part in a collective
  async_operations          starts, dones and what runs between them, in every spelling
  async_sugar               the two spellings of a generic asynchronous operation
"""
