"""No change of what a function reads goes unseen: it is followed, or the call refuses it by name.

Each case is a small program. `f` is a function of rows, written so that it means the same of whole
tensors, and each entry of `steps` changes something and returns the arguments of the next call.
After every step the row-wise function must give what `f` itself gives, or raise what `REFUSED`
says. Every case of the first table gave the old result before it was looked at.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import textwrap
import types

import pytest
import torch

import htile
from htile.errors import HTileError
from htile.frontend.captures import KNOWN, Captures

HEAD = """\
from __future__ import annotations
import contextlib, dataclasses, enum, functools, math, operator, os, random, sys, time, typing
import numpy as np
import torch
import torch.nn.functional as F
import htile
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple
import stale_settings as settings

x = torch.ones(2, 4)
VALUE = 2.0

def rebind(value):
    global VALUE
    VALUE = value
    return (x,)

"""
FOLLOWED = {
    "whether gradients are taken": """
        def f(x):
            return x * (2.0 if torch.is_grad_enabled() else 3.0)
        def without():
            torch.set_grad_enabled(False)
            return (x,)
        def with_():
            torch.set_grad_enabled(True)
            return (x,)
        steps = [lambda: (x,), without, with_]
        """,
    "a name that is not there yet": """
        def f(x):
            try:
                return x * LATER
            except NameError:
                return x
        def appear():
            globals()["LATER"] = 3.0
            return (x,)
        steps = [lambda: (x,), appear]
        """,
    "an attribute of a module that is not there yet": """
        def f(x):
            return x * (plain.LATER if hasattr(plain, "LATER") else 1.0)
        plain = type(math)("plain")
        def appear():
            plain.LATER = 3.0
            return (x,)
        steps = [lambda: (x,), appear]
        """,
    "a default of getattr": """
        class Holder:
            pass
        def f(x):
            return x * getattr(settings, "MORE", 1.0) * getattr(Holder, "Q", 1.0)
        def appear():
            settings.MORE = 3.0
            return (x,)
        def appear_in_class():
            Holder.Q = 5.0
            return (x,)
        steps = [lambda: (x,), appear, appear_in_class]
        """,
    "defaults of a static function": """
        def make(s):
            def act(x, s=s):
                return x * s
            return act
        def f(x, act: htile.Static):
            return act(x)
        steps = [lambda: (x, make(2.0)), lambda: (x, make(3.0))]
        """,
    "keyword-only defaults of a static function": """
        def make(s):
            def act(x, *, s=s):
                return x * s
            return act
        def f(x, act: htile.Static):
            return act(x)
        steps = [lambda: (x, make(2.0)), lambda: (x, make(3.0))]
        """,
    "an InitVar": """
        @dataclass(frozen=True)
        class Config:
            eps: float
            scale: InitVar[float] = 1.0
            def __post_init__(self, scale):
                object.__setattr__(self, "stored", scale)
        def f(x, c: htile.Static):
            return x * c.stored
        steps = [lambda: (x, Config(1.0, 2.0)), lambda: (x, Config(1.0, 3.0))]
        """,
    "slots of a base": """
        class Base:
            __slots__ = ("extra",)
        @dataclass(frozen=True)
        class Config(Base):
            __slots__ = ("eps",)
            eps: float
        def make(extra):
            config = Config(1.0)
            object.__setattr__(config, "extra", extra)
            return config
        def f(x, c: htile.Static):
            return x * c.extra
        steps = [lambda: (x, make(2.0)), lambda: (x, make(3.0))]
        """,
    "attributes of a tuple": """
        class Sizes(tuple):
            pass
        SIZES = Sizes((1,))
        def f(x):
            return x * SIZES.k
        def change(k):
            SIZES.k = k
            return (x,)
        steps = [lambda: change(2.0), lambda: change(3.0)]
        """,
    "attributes of a static tuple": """
        class Base(NamedTuple):
            a: int
        class Sizes(Base):
            pass
        def make(k):
            sizes = Sizes(1)
            sizes.k = k
            return sizes
        def f(x, s: htile.Static):
            return x * s.k
        steps = [lambda: (x, make(2.0)), lambda: (x, make(3.0))]
        """,
    "__kwdefaults__": """
        def helper(x, *, k=2.0):
            return x * k
        def f(x):
            return helper(x)
        def change():
            helper.__kwdefaults__ = {"k": 3.0}
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "__kwdefaults__ in place": """
        def helper(x, *, k=2.0):
            return x * k
        def f(x):
            return helper(x)
        def change():
            helper.__kwdefaults__["k"] = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "cls.X": """
        class Space:
            X = 2.0
            @classmethod
            def scale(cls, x):
                return x * cls.X
        def f(x):
            return Space.scale(x)
        def change():
            Space.X = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "an attribute that is inherited, then hidden": """
        class Base:
            X = 2.0
        class Space(Base):
            pass
        def f(x):
            return x * Space.X
        def change():
            Space.X = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "a class variable of a frozen dataclass": """
        @dataclass(frozen=True)
        class Config:
            eps: float = 1.0
            SCALE: typing.ClassVar[float] = 2.0
        CONFIG = Config()
        def f(x):
            return x * CONFIG.SCALE
        def change():
            Config.SCALE = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "a property of a frozen dataclass in another": """
        @dataclass(frozen=True)
        class Inner:
            @property
            def scale(self):
                return VALUE
        @dataclass(frozen=True)
        class Config:
            inner: Inner = Inner()
        CONFIG = Config()
        def f(x):
            return x * CONFIG.inner.scale
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a method of a static argument": """
        @dataclass(frozen=True)
        class Config:
            def scaled(self, x):
                return x * VALUE
        CONFIG = Config()
        def f(x, c: htile.Static):
            return c.scaled(x)
        def change():
            rebind(3.0)
            return (x, CONFIG)
        steps = [lambda: (x, CONFIG), change]
        """,
    "a method behind a local name": """
        @dataclass(frozen=True)
        class Config:
            def scaled(self, x):
                return x * VALUE
        CONFIG = Config()
        def f(x):
            c = CONFIG
            return c.scaled(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "an operator of a frozen dataclass": """
        @dataclass(frozen=True)
        class Config:
            def __call__(self, x):
                return x * VALUE
        CONFIG = Config()
        def f(x):
            return CONFIG(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "what makes an object": """
        @dataclass
        class Config:
            eps: float
            def __post_init__(self):
                self.eps = self.eps * VALUE
        def f(x):
            return x * Config(1.0).eps
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a default factory": """
        def make():
            return VALUE
        @dataclass
        class Config:
            eps: float = field(default_factory=make)
        def f(x):
            return x * Config().eps
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a method of a NamedTuple": """
        class Pair(NamedTuple):
            a: float
            def scaled(self, x):
                return x * self.a * VALUE
        PAIR = Pair(1.0)
        def f(x):
            return PAIR.scaled(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a method of an Enum": """
        class Mode(enum.Enum):
            A = 1
            def scaled(self, x):
                return x * VALUE
        def f(x):
            return Mode.A.scaled(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a method of a static Enum": """
        class Mode(enum.IntEnum):
            A = 1
            def scaled(self, x):
                return x * VALUE
        def f(x, mode: htile.Static):
            return mode.scaled(x)
        def change():
            rebind(3.0)
            return (x, Mode.A)
        steps = [lambda: (x, Mode.A), change]
        """,
    "an attribute of an Enum's member": """
        class Mode(enum.Enum):
            A = 1
        Mode.A.scale = 2.0
        def f(x):
            return x * Mode.A.scale
        def change():
            Mode.A.scale = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "import in the body": """
        def f(x):
            import stale_settings
            return x * stale_settings.EPS
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "from ... import in the body": """
        def f(x):
            from stale_settings import EPS as eps
            return x * eps
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "a module behind a local name": """
        def f(x):
            m = settings
            return x * m.EPS
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "a module handed to a helper": """
        def helper(x, m):
            return x * m.EPS
        def f(x):
            return helper(x, settings)
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "a module in a tuple": """
        def f(x):
            return x * (settings, 1)[0].EPS
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "getattr of a module": """
        def f(x):
            return x * getattr(settings, "EPS")
        steps = [lambda: (x,), lambda: setattr(settings, "EPS", 3.0) or (x,)]
        """,
    "a class handed to a helper": """
        class Space:
            X = 2.0
        def helper(x, space):
            return x * space.X
        def f(x):
            return helper(x, Space)
        steps = [lambda: (x,), lambda: setattr(Space, "X", 3.0) or (x,)]
        """,
    "a static class": """
        class Space:
            X = 2.0
        def f(x, space: htile.Static):
            return x * space.X
        steps = [lambda: (x, Space), lambda: setattr(Space, "X", 3.0) or (x, Space)]
        """,
    "a name that is computed": """
        class Config:
            scale_of_rows = 2.0
        def f(x, of: htile.Static):
            return x * getattr(Config, f"scale_of_{of}")
        def change():
            Config.scale_of_rows = 3.0
            return x, "rows"
        steps = [lambda: (x, "rows"), change]
        """,
    "a name of a module that is computed": """
        def f(x, of: htile.Static):
            return x * getattr(settings, of.upper(), 1.0)
        def change():
            settings.EPS = 3.0
            return x, "eps"
        steps = [lambda: (x, "eps"), change]
        """,
    "names in one string": """
        class Config:
            low = high = 2.0
        def f(x):
            return x * sum(getattr(Config, name) for name in "low high".split())
        def change():
            Config.high = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "a path of attributes": """
        class Inner:
            eps = 2.0
        class Config:
            inner = Inner
        def f(x):
            return x * operator.attrgetter("inner.eps")(Config)
        def change():
            Inner.eps = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "a field of a format": """
        class Config:
            eps = 2.0
        def f(x):
            return x * float("{0.eps}".format(Config))
        def change():
            Config.eps = 3.0
            return (x,)
        steps = [lambda: (x,), change]
        """,
    "a function's attribute": """
        def helper(x):
            return x * helper.k
        helper.k = 2.0
        def f(x):
            return helper(x)
        steps = [lambda: (x,), lambda: setattr(helper, "k", 3.0) or (x,)]
        """,
    "partial.keywords": """
        def helper(x, k):
            return x * k
        PARTIAL = functools.partial(helper, k=2.0)
        def f(x):
            return PARTIAL(x)
        steps = [lambda: (x,), lambda: PARTIAL.keywords.update(k=3.0) or (x,)]
        """,
    "the default dtype": """
        def f(x):
            return x * torch.finfo(torch.get_default_dtype()).bits
        def change(dtype):
            torch.set_default_dtype(dtype)
            return (x,)
        steps = [lambda: (x,), lambda: change(torch.float64), lambda: change(torch.float32)]
        """,
    "functools.wraps of a function of torch": """
        @functools.wraps(torch.exp)
        def helper(x):
            return x * VALUE
        def f(x):
            return helper(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a helper behind a decorator of torch": """
        @torch.no_grad()
        def helper(x):
            return x * VALUE
        def f(x):
            return helper(x)
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a helper behind a decorator of Python": """
        @contextlib.contextmanager
        def scale():
            yield VALUE
        def f(x):
            with scale() as s:
                return x * s
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a module with a name of the standard library": """
        import profile
        def f(x):
            return x * profile.EPS
        steps = [lambda: (x,), lambda: setattr(profile, "EPS", 3.0) or (x,)]
        """,
    "a helper of such a module": """
        from profile import helper
        import profile
        def f(x):
            return helper(x)
        steps = [lambda: (x,), lambda: setattr(profile, "EPS", 3.0) or (x,)]
        """,
    "super": """
        class Base:
            @classmethod
            def scale(cls):
                return VALUE
        class Space(Base):
            @classmethod
            def scale(cls):
                return super().scale() * 2
        def f(x):
            return x * Space.scale()
        steps = [lambda: (x,), lambda: rebind(3.0)]
        """,
    "a metaclass": """
        class Meta(type):
            X = 2.0
        class Space(metaclass=Meta):
            pass
        def f(x):
            return x * Space.X
        steps = [lambda: (x,), lambda: setattr(Meta, "X", 3.0) or (x,)]
        """,
}
REFUSED = {
    "a dict of a module": (
        "'settings.__dict__', which may change unseen: read the value by its own name",
        """
        def f(x):
            return x * settings.__dict__.get("EPS")
        steps = [lambda: (x,)]
        """,
    ),
    "globals of a helper": (
        "'helper.__globals__', which may change unseen",
        """
        def helper(x):
            return x
        def f(x):
            return x * helper.__globals__["VALUE"]
        steps = [lambda: (x,)]
        """,
    ),
    "a setting of a backend": (
        "captures 'torch.backends.cudnn', a mutable setting of torch",
        """
        def f(x):
            return x * (2.0 if torch.backends.cudnn.enabled else 3.0)
        steps = [lambda: (x,)]
        """,
    ),
    "the names of a module": (
        "uses 'dir'",
        """
        def f(x):
            return x * (2.0 if "EPS" in dir(settings) else 3.0)
        steps = [lambda: (x,)]
        """,
    ),
    "an undecorated subclass": ("decorate Sub with @dataclass", """
        @dataclass(frozen=True)
        class Config:
            eps: float = 1.0
        class Sub(Config):
            pass
        SUB = Sub()
        SUB.extra = 2.0
        def f(x):
            return x * SUB.extra
        """),
    "a static one": ("c is static.*decorate Sub with @dataclass", """
        @dataclass(frozen=True)
        class Config:
            eps: float = 1.0
        class Sub(Config):
            pass
        def f(x, c: htile.Static):
            return x * c.extra
        steps = [lambda: (x, Sub())]
        """),
    "os.environ": ("captures 'os.environ', a mutable _Environ", """
        def f(x):
            return x * len(os.environ["HOME"])
        """),
    "os.environ behind a local name": ("captures 'os.environ'", """
        def f(x):
            m = os
            return x * len(m.environ)
        """),
    "os.getenv": ("uses 'os.getenv'", """
        def f(x):
            return x * float(os.getenv("SCALE", 2))
        """),
    "a function that reads the clock": ("uses 'now'.*pass it as an argument", """
        from time import time as now
        def f(x):
            return x * now()
        """),
    "a class that reads the clock": ("uses 'datetime.datetime'", """
        import datetime
        def f(x):
            return x * datetime.datetime.now().year
        """),
    "a file": ("uses 'Path'", """
        from pathlib import Path
        def f(x):
            return x * len(Path("/etc/hostname").read_text())
        """),
    "a random number": ("uses 'random.random'", """
        def f(x):
            return x * random.random()
        """),
    "a random number of numpy": ("uses 'np.random.rand'", """
        def f(x):
            return x * np.random.rand()
        """),
    "a setting of torch": ("uses 'torch.get_num_threads'", """
        def f(x):
            return x * torch.get_num_threads()
        """),
    "a setting of torch's backends": ("captures 'torch.backends.*a mutable", """
        def f(x):
            return x * torch.backends.cuda.matmul.allow_tf32
        """),
    "globals()": ("uses 'globals'", """
        def f(x):
            return x * globals()["VALUE"]
        """),
    "a module's __getattr__": ("captures 'settings.ANY', which __getattr__ of the module makes", """
        def f(x):
            return x * settings.ANY
        """),
    "a mutable class variable": ("f captures 'CONFIG.TABLE'|'Config.TABLE', a mutable list", """
        @dataclass(frozen=True)
        class Config:
            TABLE: typing.ClassVar[list] = [2.0]
        CONFIG = Config()
        def f(x):
            return x * CONFIG.TABLE[0]
        """),
    "a method of a static argument": ("scaled captures 'TABLE', a mutable list", """
        TABLE = [2.0]
        @dataclass(frozen=True)
        class Config:
            def scaled(self, x):
                return x * TABLE[0]
        def f(x, c: htile.Static):
            return c.scaled(x)
        steps = [lambda: (x, Config())]
        """),
    "a bound method of a mutable object": ("act is static.*a mutable Scale", """
        class Scale:
            def __init__(self):
                self.k = 2.0
            def __call__(self, x):
                return x * self.k
        def f(x, act: htile.Static):
            return act(x)
        steps = [lambda: (x, Scale().__call__)]
        """),
    "a mutable value of an Enum": ("holds a mutable list", """
        class Mode(enum.Enum):
            A = [2.0]
        def f(x):
            return x * Mode.A.value[0]
        """),
    "a lru_cache": ("captures 'helper', a mutable _lru_cache_wrapper", """
        @functools.lru_cache
        def helper():
            return VALUE
        def f(x):
            return x * helper()
        """),
    "a singledispatch": ("uses 'helper', a functools.singledispatch", """
        @functools.singledispatch
        def helper(value):
            return 2.0
        def f(x):
            return x * helper(1)
        """),
    "a context of decimal numbers": ("uses 'decimal.getcontext'", """
        import decimal
        def f(x):
            return x * decimal.getcontext().prec
        """),
    "an object that hashes by value": ("s is static.*a mutable Scale", """
        class Scale:
            k = 2.0
            def __hash__(self):
                return 1
            def __eq__(self, other):
                return True
        def f(x, s: htile.Static):
            return x * s.k
        steps = [lambda: (x, Scale())]
        """),
    "a string with attributes": ("s is static|expected a tensor.*Name", """
        class Name(str):
            pass
        def f(x, s):
            return x * s.k
        steps = [lambda: (x, Name("a"))]
        """),
}  # fmt: skip
# What must go on working, without a second trace.
TAKEN = {
    "frozen dataclasses": """
        CHOICES = {"a": 1}
        @dataclass(frozen=True)
        class Config:
            eps: float = 0.5
            sizes: tuple = (1, 2)
            def __post_init__(self):
                assert "a" in CHOICES
            @functools.cached_property
            def twice(self):
                return self.eps * 2
            def scaled(self, x):
                return x * self.eps
            def saved(self):
                return open(str(CHOICES))
        CONFIG = Config()
        def f(x, c: htile.Static):
            return CONFIG.scaled(x) + c.scaled(x) * CONFIG.sizes[0] + CONFIG.twice
        steps = [lambda: (x, Config()), lambda: (x, Config())]
        """,
    "libraries": """
        from collections.abc import Sequence
        from fractions import Fraction
        Size, HALF, NAME = typing.Optional[int], Fraction(1, 2), "a".join
        def f(x):
            y: Size = typing.cast(int, 2)
            dtype = torch.float32 if torch.is_grad_enabled() else torch.float32
            z = F.silu(x).to(dtype) * math.pi + np.float32(2.0) * np.sqrt(4.0) + operator.add(y, 1)
            assert not isinstance(z, Sequence) and NAME(("b",)) == "b"
            z = z + float(HALF)
            return z + max(int("1"), len((1, 2))) + torch.finfo(torch.float16).eps * sys.maxsize
        """,
    "helpers": """
        PARTIAL = functools.partial(F.leaky_relu, negative_slope=0.5)
        class Mode(enum.Enum):
            RELU = 1
            PART = functools.partial(torch.exp)
        class Pair(NamedTuple):
            low: torch.Tensor
            high: torch.Tensor
        @htile.rowwise
        def inner(x):
            return x * VALUE
        def helper(x, mode=Mode.RELU):
            return PARTIAL(x) if mode is Mode.RELU else x
        def f(x):
            pair = Pair(helper(x), inner(x))
            return sum((pair.low, pair.high)) if isinstance(pair, tuple) else x
        """,
    "classes with methods that no call runs": """
        LOG = []
        @dataclass(frozen=True)
        class Config:
            eps: float = 0.5
            def __repr__(self):
                return f"Config {len(LOG)}"
        CONFIG = Config()
        def f(x):
            'It says {nothing} of % and of LOG.'
            return x * CONFIG.eps * getattr(CONFIG, "scale", 2.0) * getattr(Config, "eps", x.sum())
        """,
    "an import of a library": """
        def f(x):
            import math
            import torch.nn.functional as functional
            from torch import exp
            return exp(functional.relu(x)) * math.e
        """,
    "an import that there is not": """
        def f(x):
            try:
                import no_such_module
            except ImportError:
                return x * 2
            return x * no_such_module.K
        """,
    "torch.compiler": """
        def f(x):
            return x * 2 if torch.compiler.is_compiling() or torch.jit.is_scripting() else x
        """,
}


# What runs a special method of a class: how it is defined, and how it is used.
SPECIAL = {
    "__str__": ("def __str__(self): return str(VALUE)", "float(str(OF))"),
    "__str__, by %": ("def __str__(self): return str(VALUE)", "float('%s' % OF)"),
    "__format__": ("def __format__(self, how): return str(VALUE)", "float(f'{OF}')"),
    "__repr__": ("def __repr__(self): return str(VALUE)", "float(repr(OF))"),
    "__iadd__": ("def __iadd__(self, other): return VALUE", "added(OF)"),
    "__divmod__": ("def __divmod__(self, other): return VALUE, 0", "divmod(OF, 2)[0]"),
    "__reversed__": ("def __reversed__(self): return iter((VALUE,))", "next(reversed(OF))"),
    "__copy__": ("def __copy__(self): return VALUE", "copy.copy(OF)"),
    "__setitem__": ("pass", "stored()"),
    "keys": ("keys, __getitem__ = (lambda self: 'abc'[: int(VALUE)]), (lambda self, key: 1)",
             "len(dict(OF))"),
    "__class_getitem__": ("def __class_getitem__(cls, key): return VALUE", "Kind[1]"),
    "__init_subclass__": ("def __init_subclass__(cls): cls.k = VALUE", "subclass().k"),
    "__set_name__": ("def __set_name__(self, owner, name): owner.k = VALUE", "holder().k"),
    "__mro_entries__": ("def __mro_entries__(self, bases): return (of_value(),)", "inherited().k"),
    "__instancecheck__": ("pass", "(2.0 if isinstance(1, Asked) else 3.0)"),
    "__subclasscheck__": ("pass", "(2.0 if issubclass(int, Asked) else 3.0)"),
    "__getattr__ of a metaclass": ("pass", "Asked.anything"),
}  # fmt: skip
SPECIAL_OF = """
    import copy
    @dataclass(frozen=True, repr=False)
    class Kind:
        {method}
    class Meta(type):
        def __instancecheck__(cls, one):
            return VALUE > 2.5
        __subclasscheck__ = __instancecheck__
        def __getattr__(cls, name):
            return VALUE
    class Asked(metaclass=Meta):
        pass
    def of_value():
        return type("Of", (), {{"k": VALUE}})
    def added(one):
        one += 1
        return one
    class Keeping:
        def __setitem__(self, key, value):
            self.value = value * VALUE
    def stored():
        one = Keeping()
        one[0] = 1.0
        return one.value
    def subclass():
        class Sub(Kind):
            pass
        return Sub
    def holder():
        class Holder:
            one = Kind()
        return Holder
    def inherited():
        class Heir(OF):
            pass
        return Heir
    OF = Kind()
    def f(x):
        return x * {use}
    steps = [lambda: (x,), lambda: rebind(3.0)]
    """


@pytest.fixture
def run(monkeypatch):
    """`run(code)` gives the function of a case and its steps."""
    settings = types.ModuleType("stale_settings")
    exec("EPS = 2.0", vars(settings))
    settings.__getattr__ = lambda name: {"ANY": 2.0}.get(name) or getattr(object(), name)
    profile = types.ModuleType("profile")
    profile.__file__ = "/home/user/profile.py"
    text = "EPS = 2.0\ndef helper(x):\n    return x * EPS"
    exec(compile(text, profile.__file__, "exec"), vars(profile))
    monkeypatch.setitem(sys.modules, "stale_settings", settings)
    monkeypatch.setitem(sys.modules, "profile", profile)
    module = types.ModuleType("stale_case")
    monkeypatch.setitem(sys.modules, "stale_case", module)
    module.__file__ = "/home/user/stale_case.py"

    def run(code):
        text = HEAD + textwrap.dedent(code)
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
        exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(module))
        names = vars(module)
        return names["f"], names.get("steps", [lambda: (names["x"],)] * 2)

    yield run
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(run, name):
    f, steps = run(FOLLOWED[name])
    compiled, results = htile.rowwise(f), []
    for step in steps:
        args = step()
        results.append(f(*args).float())
        assert torch.equal(compiled(*args), results[-1])
    assert not torch.equal(results[0], results[1]), "the step changes what f gives"


@pytest.mark.parametrize("name", SPECIAL)
def test_special_methods_are_followed(run, name):
    method, use = SPECIAL[name]
    f, steps = run(SPECIAL_OF.format(method=method, use=use))
    compiled, results = htile.rowwise(f), []
    for step in steps:
        args = step()
        results.append(f(*args))
        assert torch.equal(compiled(*args), results[-1])
    assert not torch.equal(*results), "the step changes what f gives"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(run, name):
    words, code = REFUSED[name]
    f, steps = run(code)
    with pytest.raises(HTileError, match=words):
        htile.rowwise(f)(*steps[0]())


@pytest.mark.parametrize("name", TAKEN)
def test_taken(run, name):
    f, steps = run(TAKEN[name])
    compiled = htile.rowwise(f)
    for step in steps:
        args = step()
        torch.testing.assert_close(compiled(*args), f(*args), check_dtype=False)
    assert len(compiled._specializations._known) == 1
    assert compiled._captures.fingerprint() is compiled._captures.fingerprint()


def test_a_fingerprint_costs_as_many_reads_as_there_are_names(run):
    f, _ = run("""
        def helper(x, scale=2.0):
            return torch.exp(x) * scale * VALUE
        def f(x):
            return F.silu(helper(x)) * math.pi + max(1, 2)
        """)
    watched, _ = Captures(f).watched()
    # F, math, helper, max; of helper its code, its defaults, torch, VALUE
    assert len(watched) == 8


def test_known_fingerprints_are_bounded(run):
    f, _ = run("def f(x):\n    return x * VALUE")
    captures = Captures(f)
    for value in itertools.islice(itertools.count(), 3 * KNOWN):
        f.__globals__["VALUE"] = value
        captures.fingerprint()
    assert len(captures._known) <= KNOWN
