"""Compiled programs as data: reads and writes HLO text, and answers questions about it.

Nothing in this folder knows about times, and nothing in it imports JAX.

  shapes, module            the data: shapes and layouts, instructions, computations, modules
  source_location           the JAX operation and the line of Python that an instruction came from
  cursor, shape_reader, reader, writer      text to data, and data to text
  trip_count                how often a loop runs
  value_flow                where a value goes
  participants              which devices take part in a collective
  async_operations          starts, dones and what runs between them, in every spelling
  host_callbacks            calls from a program into Python
  origins                   the line and the place in a training step that an instruction comes from
  axis_names                the mesh axes over which a collective communicates
  from_compiled, files      the module of a compiled program, and of a file
"""
