"""Compiling for TPU topologies on a machine without a TPU.

mesh_order    which chip stands where in a mesh
topologies    the topologies that libtpu describes, and meshes over their devices
placement     moves the shardings of arguments to a topology
program       `CompiledProgram`, the result
hbm_error     the error for a program that does not fit
worker        the child process, in which libtpu compiles
process       the parent's side of it
compile_for   `compile_for`, the public function
"""
