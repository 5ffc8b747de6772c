"""Norms as users' libraries write them, which no part of HTile knows."""

import torch


class LlamaRMSNorm(torch.nn.Module):
    """With its casts, and an eps of another name."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaRMSNorm(torch.nn.Module):
    """With 1 + weight, and a method that the forward calls."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5LayerNorm(torch.nn.Module):
    """Without a mean, and with a branch on the weight's dtype."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


NORMS = (LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm)


class Block(torch.nn.Module):
    """A small block of a model, with modules that have a kernel and others."""

    def __init__(self, n, norm=LlamaRMSNorm):
        super().__init__()
        self.before, self.after = norm(n), norm(n)
        self.up, self.down = torch.nn.Linear(n, 2 * n), torch.nn.Linear(2 * n, n)
        self.activation, self.dropout = torch.nn.GELU(), torch.nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.dropout(self.down(self.activation(self.up(self.before(x)))))
        return self.after(x)
