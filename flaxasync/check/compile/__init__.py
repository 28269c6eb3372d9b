"""Compiling for TPU topologies on a machine without a TPU.

topologies    the topologies that libtpu describes, meshes over them, and the move of arguments to such a mesh
program       `CompiledProgram`, the result; `HbmError`, for a program that does not fit
worker        the child process, in which libtpu compiles
process       starts the child process and talks to it
compile_for   `compile_for`, the public function
"""
