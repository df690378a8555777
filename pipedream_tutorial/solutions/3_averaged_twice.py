"""Solution: each loss is already divided by m, so the sum of the gradients is the mean. The code
divided this mean by m again."""

import torch
from torch.nn.functional import cross_entropy


def batch_gradient(model, microbatches):
    parameters, m = list(model.parameters()), len(microbatches)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for x, target in microbatches:
        loss = cross_entropy(model(x), target) / m
        gradients = torch.autograd.grad(loss, parameters)
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    return total
