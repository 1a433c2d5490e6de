"""A device called `strict`, computed on the CPU, that refuses what fails on a GPU: `REINFORGE_TEST_DEVICE=strict`.

Its tensors are wrappers around tensors of the CPU, so every number is real and every test of the engine can run on it:

- an operation on tensors of two devices is an error, as on CUDA (a tensor with one number may be on the CPU)
- there is no float64, as on MPS
- a copy from or to the CPU has to wait (no `non_blocking`): MPS reads the source after the call has returned
- `.numpy()` is an error, as on every GPU
- `device.type` is not "cpu", so code for CPUs alone is left out, and backward passes run in another thread

It says nothing about speed, nor about the kernels of a GPU. It is registered as torch's `PrivateUse1` backend, once in
a process and until its end, which is why other tests start a process for it.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "strict"

copies: Counter[str] = Counter()  # copies `to_cpu` and `to_device` so far

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_make_tensor = torch.tensor
_libraries: list[torch.library.Library] = []


class StrictTensor(torch.Tensor):
    """A tensor of the device `strict`; `inner` has its numbers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        if inner.dtype == torch.float64:
            raise TypeError("the device strict has no float64")
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        wrapper.inner = inner
        return wrapper

    def __repr__(self, **_):
        return f"StrictTensor({self.inner})"

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.inner.untyped_storage()  # safetensors compares the places in memory

    def __getitem__(self, places):
        return super().__getitem__(_move_places(places))

    def __setitem__(self, places, value):
        super().__setitem__(_move_places(places), value)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})


def _compute(function: Any, args: Any, kwargs: Any) -> Any:
    """Computes an operation with a strict tensor or a strict result."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
        return function.decompose(*args, **kwargs)  # in inference mode torch leaves this to the backend
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _count(function, tensors, kwargs)
    waits = not (kwargs.get("non_blocking") or (function is torch.ops.aten.copy_.default and True in args[2:]))
    _check(function, tensors, waits=waits)
    to_cpu = "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cpu" and tensors
    inner_kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
    inner_args, inner_kwargs = tree_map_only(StrictTensor, lambda tensor: tensor.inner, (args, inner_kwargs))
    result = function(*inner_args, **inner_kwargs)
    if to_cpu and kwargs["device"] is not None:
        return result
    strict = [tensor for tensor in tensors if isinstance(tensor, StrictTensor)]
    if any(tensor.shape != tensor.inner.shape for tensor in strict):
        raise NotImplementedError(f"{function} resizes a tensor, which the device strict cannot do")
    changed = {id(tensor.inner): tensor for tensor in strict}  # an operation in place returns its argument
    changed |= {id(tensor): tensor for tensor in tensors if not isinstance(tensor, StrictTensor)}
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)
    # a view of an ordinary tensor is an ordinary tensor, in inference mode, too
    with torch.inference_mode(torch.is_inference_mode_enabled() and not (is_view and not strict[0].is_inference())):
        return tree_map_only(
            torch.Tensor,
            lambda tensor: changed[id(tensor)] if id(tensor) in changed else StrictTensor(tensor),
            result,
        )


def _count(function: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
    if function is torch.ops.aten.copy_.default:
        target, source = (isinstance(each, StrictTensor) for each in tensors)
    elif function is torch.ops.aten._to_copy.default:
        source = isinstance(tensors[0], StrictTensor)
        target = source if kwargs.get("device") is None else torch.device(kwargs["device"]).type != "cpu"
    else:
        return
    copies["to_device"] += target and not source
    copies["to_cpu"] += source and not target


def _check(function: Any, tensors: list[torch.Tensor], *, waits: bool) -> None:
    others = [tensor for tensor in tensors if not isinstance(tensor, StrictTensor)]
    if function not in _COPIES:
        if len(others) < len(tensors) and any(tensor.ndim for tensor in others):
            shapes = [f"{tensor.device.type} {list(tensor.shape)}" for tensor in tensors]
            raise RuntimeError(f"{function}: Expected all tensors to be on the same device, but found {shapes}")
    elif others and not waits:
        raise RuntimeError(
            f"{function}: a copy between devices must not be non_blocking: the source may change before it is read"
        )


def _make_tensor_in_two_steps(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
    """`torch.tensor`, which in one step does not reach a backend written in Python."""
    tensor = _make_tensor(data, **kwargs)
    return (tensor if device is None else tensor.to(device)).requires_grad_(requires_grad)


def _move_places(places: Any) -> Any:
    """Returns places inside a tensor with lists as tensors of the device, which torch would make in one step."""
    if isinstance(places, tuple):
        return tuple(map(_move_places, places))
    return _make_tensor(places).to(NAME) if isinstance(places, list) else places


def register() -> None:
    """Makes the device known to torch."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.PrivateUse1

    _setup_privateuseone_for_python_backend(NAME, device_guard=Guard())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda function, *args, **kwargs: _compute(function, args, kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL", "PrivateUse1")
    factories = torch.ops.aten  # torch would resize an empty tensor for these
    for function in (
        factories.arange.default,
        factories.arange.start,
        factories.arange.start_step,
        factories.linspace.default,
    ):
        aten.impl(function, lambda *args, _function=function, **kwargs: _compute(_function, args, kwargs))
    _libraries.extend((everything, aten))
    _device_constructors()  # the list of what `with torch.device(...)` changes, made before `torch.tensor` is replaced
    torch.tensor = _make_tensor_in_two_steps
