"""As much of torch as the allocation hook uses, for an environment that has none.

A tensor is an address and a length. ``zeros`` goes through the active function modes, as it
does in torch; within one of them it does not.
"""

import itertools
from types import ModuleType, SimpleNamespace


class Device:
    def __init__(self, kind, index=None):
        if isinstance(kind, Device):
            kind, index = kind.type, kind.index
        self.type, _, number = kind.partition(":")
        self.index = int(number) if number else index


class Tensor:
    def __init__(self, address, size, owner=None):
        self.address, self.size, self.owner = address, size, owner

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.size


def make_torch(*, current_device=0):
    """Return a module; ``plain`` are tensors it allocated by itself, ``copies`` makes copies."""
    torch = ModuleType("torch")
    modes = []
    addresses = itertools.count(0x1000, 0x1000)
    torch.plain = []
    torch.copies = False
    torch.refuses = None

    class TorchFunctionMode:
        def __enter__(self):
            modes.append(self)
            return self

        def __exit__(self, *_):
            modes.remove(self)

    def zeros(*args, **kwargs):
        if modes:
            mode = modes.pop()
            try:
                return mode.__torch_function__(zeros, (), args, kwargs)
            finally:
                modes.append(mode)
        torch.plain.append(Tensor(next(addresses), args[0]))
        return torch.plain[-1]

    def as_tensor(array, device=None):
        if torch.refuses is not None:
            raise torch.refuses
        interface = array.__cuda_array_interface__
        assert interface["typestr"] == "|i1"
        assert device.type == "cuda"
        (size,) = interface["shape"]
        address, read_only = interface["data"]
        assert not read_only
        return Tensor(next(addresses) if torch.copies else address, size, array)

    torch.zeros, torch.as_tensor = zeros, as_tensor
    torch.int8, torch.float16 = "int8", "float16"
    torch.device = Device
    torch.cuda = SimpleNamespace(current_device=lambda: current_device)
    torch.overrides = SimpleNamespace(TorchFunctionMode=TorchFunctionMode)
    return torch
