"""Compiled programs as data: reads and writes HLO text, and answers questions about it.

Nothing in this folder knows about times, and nothing in it imports JAX to read a text.

  shapes, module, source_location           the data: shapes, instructions, computations, modules, and their lines
  reader                                    text to data
  load                                      the module of a compiled program, and of a file
  trip_count                                how often a loop runs
  value_flow                                where a value goes
  participants                              which devices take part in a collective, and over which mesh axes
  async_operations                          starts, dones and what runs between them, in every spelling
  origins                                   where an instruction comes from, and whether it calls Python
"""
