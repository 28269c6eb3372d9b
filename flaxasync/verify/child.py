"""The process that opens the devices and runs cases: `python -m flaxasync.verify.child`, started by supervisor.py.

It reads one JSON request from the first line of stdin, and writes one line of JSON for each message to stdout, after a
mark that tells messages from what kernels and libraries print. It ends when stdin ends, because then its parent has
ended, and a child that outlived it would keep the chips. The messages are:

  {"machine": {...}}                                what the devices are
  {"calibration": {...}}                            if the request asks for it
  {"begin": 3}                                      case 3 of the request begins
  {"done": 3, "measurement": {...}}                 what came of it; or "unsupported", "error" or "not_run"

The process may hang or crash at any point: the supervisor knows from the last message which case did it.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MARK = "\x1eflaxasync "


def main() -> None:
    """Serves one request."""
    request = read_request()
    import jax

    topology = request["rehearse"]
    platform = "cpu" if topology else request["platform"]
    if platform:
        jax.config.update("jax_platforms", platform)
    jax.config.update("jax_num_cpu_devices", 4 if topology else request["cpu_devices"])  # as `stand_in` needs
    from flaxasync.mesh import UnsupportedError
    from flaxasync.verify import pod
    from flaxasync.verify.cases import Case
    from flaxasync.verify.measure import Measurement, calibrate, run_case
    from flaxasync.verify.rehearsal import rehearse_calibration, rehearse_case

    distributed = request["number"] is not None
    if distributed:
        pod.join(request["number"], request["start_limit"])
    run: Callable[..., Measurement] = run_case
    rates: Callable[[], dict[str, float]] = calibrate
    if topology:
        run = functools.partial(rehearse_case, topology=topology)
        rates = functools.partial(rehearse_calibration, topology)
    machine = describe_machine(topology)
    say({"machine": machine})
    if machine["processes"] > 1 and not distributed:
        return  # the parent says how to verify the chips of several machines
    refusal = pod.refusal(request["cases"]) if distributed else None
    if request["calibrate"]:
        say({"calibration": rates()})
    for number, data in enumerate(request["cases"]):
        say({"begin": number})
        outcome: dict[str, Any] = {"done": number}
        if refusal:
            say(outcome | {"not_run": refusal})
            continue
        try:
            outcome["measurement"] = dataclasses.asdict(run(Case.from_json(data), repeats=request["repeats"]))
        except UnsupportedError as error:  # other NotImplementedErrors are of the compiler of kernels, and errors
            outcome["unsupported"] = str(error)
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        say(pod.share(outcome) if distributed else outcome)


def read_request() -> dict[str, Any]:
    """Returns the request, and from then on ends this process as soon as stdin ends."""
    request = json.loads(sys.stdin.readline())

    def end_with_the_parent() -> None:
        while os.read(0, 1024):  # sys.stdin.read() would hold a lock that the interpreter needs in order to end
            pass
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    return request


def say(message: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def describe_machine(topology: str | None = None) -> dict[str, Any]:
    """Returns what the results depend on: the devices, their links, and the versions of the software.

    Args:
      topology: The topology of a rehearsal, whose described devices take the place of those of this machine.
    """
    import jax

    import flaxasync as fa
    from flaxasync.hardware import chip_of_device

    devices = fa.check.topology_devices(topology) if topology else jax.devices()
    device = devices[0]
    chip = chip_of_device(device.device_kind)
    ring = fa.make_mesh((len(devices),), ("ring",), devices=devices)
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "chip": chip.name if chip else None,
        "devices": len(devices),
        "processes": jax.process_count(),
        "cores": getattr(device, "num_cores", None),
        "coords": [list(getattr(d, "coords", ())) for d in devices],
        "ring": str(fa.mesh_report(ring)[0]),
        "rehearsal": topology,
        "versions": {name: _version(name) for name in ("flaxasync", "jax", "jaxlib", "libtpu")},
    }


def _version(package: str) -> str | None:
    if package == "flaxasync":
        import flaxasync as fa

        return fa.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
