"""The audit of a compiled program: whether its transfers overlap with work, and whether they are safe.

The folder is not called audit, because a module of that name would hide the public function `flaxasync.check.audit`.

  findings         what an audit can find, with severity and remedy; the data of the result, and its table
  hazards          what the compiler does to a buffer in flight; the rules of XLA's asynchronous instructions
  overlap          what runs inside a window, and what the chip waits for
  advice           what to do about a collective for which the chip waits
  wide_transfers   transfers of a wider type than the program keeps
  audit            `audit`, the public function
"""
