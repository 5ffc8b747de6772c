"""`make bench`: the cost of the pipeline here, and on a GPU the bandwidth of the kernels."""

import sys

import torch

from benchmarks import pipeline, throughput

if __name__ == "__main__":
    pipeline.main()
    if torch.cuda.is_available():
        throughput.main()
    else:
        print("No GPU: bandwidth is not measured", file=sys.stderr)
