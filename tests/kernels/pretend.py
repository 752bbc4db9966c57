"""Pretended CUDA devices on the CPU: their tensors say that they are on cuda:0 or cuda:1, and refuse what a host would wait for.

Host tensors (page tables and the like) stay what they are, so that what is refused is just what crosses between host and
device or makes a shape of a value. Triton kernels run on the pretended tensors in the interpreter. Streams and events do nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from oasis_cache import transfer
from oasis_cache.kernels.triton_ops import launch
from oasis_cache.store import HostMemory

DEVICE, SECOND_DEVICE = torch.device("cuda", 0), torch.device("cuda", 1)
# Operations that need a value, or the number of some values, on the host.
WAITING = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "argwhere", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal", "is_nonzero", "allclose",
}  # fmt: skip
READING = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}


launched: Counter[str] = Counter()  # operations and kernels that a device would have been given
_may_wait = False


class WaitError(AssertionError):
    """The host would have to wait for the device."""


class WrongDeviceError(AssertionError):
    """Tensors of several devices met, or a kernel would start on another one than its tensors'."""


@contextlib.contextmanager
def waiting_allowed() -> Iterator[None]:
    """Inside, what would wait is done."""
    global _may_wait
    before, _may_wait = _may_wait, True
    try:
        yield
    finally:
        _may_wait = before


def _refuse_unless_allowed(operation: str) -> None:
    if not _may_wait:
        raise WaitError(operation)


class DeviceTensor(torch.Tensor):
    """A tensor of a pretended device; `inner` has its values. To C++ it lies on the CPU, to Python on `place`."""

    inner: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, place: torch.device = DEVICE) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )
        tensor.inner, tensor.place = inner, place
        return tensor

    def __init__(self, inner: torch.Tensor, place: torch.device = DEVICE) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.place)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        """Nothing is freed while a stream uses it: there are none."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def to_device(tensor: torch.Tensor, device: torch.device = DEVICE) -> DeviceTensor:
    """A copy on a pretended device."""
    return DeviceTensor(tensor.clone(), device)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _place(device: Any) -> torch.device:
    return torch.device("cuda", torch.device(device).index or 0)


def _unwrapped(value: Any) -> Any:
    return tree_map(lambda item: item.inner if isinstance(item, DeviceTensor) else item, value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation with device tensors among its arguments: refused if a host waits, else done on what they hold."""
    name = func._schema.name.removeprefix("aten::")
    _refuse(name, func, args, kwargs)
    if not _is_free(func):
        launched[name] += 1
    given = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, DeviceTensor)]
    places = {item.place for item in given if item.dim() > 0 or name == "copy_"} or {given[0].place}
    if len(places) > 1 and name != "copy_":
        raise WrongDeviceError(f"{name} with tensors of {sorted(map(str, places))}")
    place = args[0].place if name == "copy_" and isinstance(args[0], DeviceTensor) else places.pop()
    out = func(*_unwrapped(args), **_unwrapped(kwargs))
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        return args[0]

    def wrap(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        same = [tensor for tensor in given if tensor.inner is item]
        return same[0] if same else DeviceTensor(item, place)

    return tree_map(wrap, out)


def _is_free(func: Any) -> bool:
    """Whether an operation only makes a view, or memory without a value."""
    views = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return "empty" in func._schema.name or any(not alias.is_write for alias in views)


def _refuse(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if name in WAITING or (name == "repeat_interleave" and func._overloadname == "Tensor"):
        _refuse_unless_allowed(f"{name} of a device tensor")
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    mixed = any(not isinstance(item, DeviceTensor) and item.dim() > 0 for item in tensors)
    if name == "copy_":
        if mixed and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
            _refuse_unless_allowed("a blocking copy between host and device")
        return
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [item for item in args[1] if item is not None]
        if any(item.dtype in (torch.bool, torch.uint8) for item in indices):
            _refuse_unless_allowed(f"{name} with a mask")
    if mixed:
        _refuse_unless_allowed(f"{name} with tensors of host and device")


class _Functions(TorchFunctionMode):
    """Makes tensors on the pretended device, which PyTorch itself would refuse to, and sees reads that never reach an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        own = bool(args) and isinstance(args[0], DeviceTensor)
        if own and name in READING:
            _refuse_unless_allowed(f"{name} of a device tensor")
            return func(args[0].inner, *args[1:], **kwargs)
        if own and name == "data_ptr":
            return args[0].inner.data_ptr()
        if func is torch.Tensor.to:
            return _moved(args, kwargs)
        if _is_device(kwargs.get("device")):
            place = _place(kwargs["device"])
            return DeviceTensor(func(*_unwrapped(args), **(_unwrapped(kwargs) | {"device": "cpu"})), place)
        return func(*args, **kwargs)


def _moved(args: Any, kwargs: dict[str, Any]) -> Any:
    """`tensor.to(...)`, to another device or not."""
    tensor = args[0]
    devices = [item for item in (*args[1:], kwargs.get("device")) if isinstance(item, str | torch.device)]
    rest = [item for item in args[1:] if not isinstance(item, str | torch.device)]
    waits = not kwargs.get("non_blocking", False)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
    if isinstance(tensor, DeviceTensor):
        if not all(_is_device(device) for device in devices):
            _refuse_unless_allowed("a copy to the host")
            tensor = tensor.inner.clone()
        elif devices and _place(devices[0]) != tensor.place:
            tensor = to_device(tensor.inner, _place(devices[0]))
    elif any(_is_device(device) for device in devices):
        if waits:
            _refuse_unless_allowed("a blocking copy to the device")
        tensor = to_device(tensor, _place(devices[0]))
    return tensor.to(*rest, **kwargs) if rest or kwargs else tensor


class _Stream:
    """A stream, or an event, that has nothing to do."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return False


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Inside, `DEVICE` can be used, and a wait for it raises `WaitError`."""
    start = launch.start

    def interpret(kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]) -> None:
        launched[kernel.fn.__name__.strip("_")] += 1
        places = {item.place for item in arguments.values() if isinstance(item, DeviceTensor)}
        if places - {_place(device)}:
            raise WrongDeviceError(f"{kernel.fn.__name__} on {device} with tensors of {sorted(map(str, places))}")
        with torch._C.DisableTorchFunction():
            start(kernel, grid, torch.device("cpu"), _unwrapped(arguments))

    def page_locked(memory: HostMemory, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    with (
        mock.patch.object(launch, "start", interpret),
        mock.patch.object(launch, "describe", return_value=launch.Device("interpreter", 4)),
        mock.patch.object(HostMemory, "_allocate_pinned", page_locked),
        mock.patch.object(transfer, "_side_stream", _Stream),
        mock.patch.object(torch.cuda, "current_stream", _Stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "Event", _Stream),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        _Functions(),
    ):
        yield
