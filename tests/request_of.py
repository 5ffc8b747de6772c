"""The request that a call makes of the lowering, without the call."""

from htile.frontend.roles import classify
from htile.run.launch import Request
from htile.run.out import find_aliases


def request_of(function, args, outs=(), kwargs=None) -> Request:
    """The request of `function(*args, **kwargs, out=outs)`. Raises what the call would raise."""
    signature = function._signature
    values = signature.bind(tuple(args), kwargs or {})
    call, aliases = classify(signature, values), find_aliases(signature, values, outs)
    return function._request(call, function._captures.fingerprint(), values, outs, aliases)[0]
