"""The device that the engine's tests run on: `REINFORGE_TEST_DEVICE=cuda make test`.

`cpu` unless the variable says `cuda`, `mps` or `strict` (`tests/strict_device.py`). Tests of code for CPUs alone name
"cpu" themselves.
"""

import os

DEVICES = ("cpu", "cuda", "mps", "strict")

DEVICE = os.environ.get("REINFORGE_TEST_DEVICE", "cpu")

if DEVICE not in DEVICES:
    raise ValueError(f"REINFORGE_TEST_DEVICE is {DEVICE!r}; use one of: {', '.join(DEVICES)}")
if DEVICE == "strict":
    from tests.strict_device import register

    register()
