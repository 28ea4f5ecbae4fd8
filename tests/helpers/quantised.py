"""A quantised weight as torchao and others have it: a subclass that knows `linear` alone."""

import torch


class Quantised(torch.Tensor):
    """Whole numbers behind the shape and the dtype of the weight they were made of."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.ints = (weight * 100).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].ints.to(args[0].dtype) / 100, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(func)
