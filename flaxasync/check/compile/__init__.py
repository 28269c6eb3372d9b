"""Compiling for TPU topologies on a machine without a TPU.

mesh_order    the order of the chips in a mesh
topologies    the topologies that libtpu describes, and meshes over their devices
placement     moves the shardings of arguments to a topology
program       `CompiledProgram`, the result
hbm_error     the error for a program that does not fit
worker        the child process, in which libtpu compiles
process       starts the child process and talks to it
compile_for   `compile_for`, the public function
"""
