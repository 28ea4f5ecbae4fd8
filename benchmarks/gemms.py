"""Times the head's GEMMs one by one, beside what the cost model predicts.

    python -m benchmarks.gemms [--device cpu|cuda] [--heads 151936,1536] [--rows 512 5120]

The three products of a chunk of C rows with a head [V, H], in bf16 on a GPU: the logits and dH with
float32 and with bf16 outputs, and dW added to a float32 sum (beta 1), put in its place (beta 0), or
in bf16. Leading dimensions are padded as the library pads them. A product is compared with float64
at some of its entries, and gets no time if it is wrong. --kernels prints the names of the kernels,
too, with PyTorch's profiler. On a CPU the sizes are tiny: that shows that all of it runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cost_model import error_of_the_model
from benchmarks.gpu_costs import Device, device_of, gemm_ms
from benchmarks.measure import add_device_option, header, print_header, reason, write_json
from benchmarks.tune import measure
from grpo_kernels.head.products import addmm

# The odd vocabulary is GPT-2's, next to it the same padded: on some GPUs odd ones are slow.
HEADS = ((151_936, 896), (151_936, 2048), (151_936, 4096), (50_257, 1536), (50_304, 1536))
ROWS = (512, 1024, 4096)
TINY_HEADS, TINY_ROWS = ((600, 32), (601, 32)), (8, 24)
# Relative to the largest of the entries that are compared.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


class Product(NamedTuple):
    """`run` writes a @ b to `out`, of which `moved` bytes per entry are read and written."""

    name: str
    a: Tensor
    b: Tensor
    out: Tensor
    run: Callable[[], None]
    moved: int


def products(C: int, V: int, H: int, device: torch.device) -> Iterator[Product]:
    """Yields the products of C rows, one after the other: their outputs are large."""
    g = torch.Generator(device).manual_seed(0)
    width = -(-V // 64) * 64  # rows begin where vectors do, whatever V is

    def made(dtype: torch.dtype, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        x = torch.empty(rows, columns, dtype=dtype, device=device)
        return x.normal_(0.0, scale, generator=g)

    for dtype in (torch.float32, torch.bfloat16):
        # Only CUDA gives a float32 product of bf16 operands.
        operand = torch.bfloat16 if device.type == "cuda" else dtype
        hidden, weight = made(operand, C, H), made(operand, V, H, H**-0.5)
        d_logits = made(operand, C, width, C**-0.5)[:, :V]

        logits = torch.empty(C, width, dtype=dtype, device=device)[:, :V]
        yield _product("logits", hidden, weight.t(), logits)
        del logits
        d_hidden = torch.empty(C, H, dtype=dtype, device=device)
        yield _product("dH", d_logits, weight, d_hidden)
        d_weight = torch.empty(V, H, dtype=dtype, device=device)
        for beta in (0, 1):
            yield _product(f"dW, beta {beta}", d_logits.t(), hidden, d_weight, beta)


def _product(name: str, a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> Product:
    run = partial(addmm, out, a, b, beta=float(beta))
    kind = str(out.dtype).removeprefix("torch.")
    moved = out.element_size() * (2 if beta else 1)
    return Product(f"{name}, {kind}", a, b, out.zero_(), run, moved)


def is_right(p: Product) -> bool:
    """Runs a product once, on an output of zeros, and compares some of its entries."""
    p.run()
    rows, columns = slice(0, None, max(1, len(p.a) // 16)), slice(0, 64)
    expected = p.a[rows].double() @ p.b[:, columns].double()
    off = (p.out[rows, columns].double() - expected).abs().max()
    return bool(off <= TOLERANCE[p.out.dtype] * expected.abs().max())


def kernels(run: Callable[[], Any]) -> list[str]:
    """Returns the names of the GPU kernels that a call launches, or why there are none."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
        return [x.key for x in profiled.key_averages() if x.device_type.name == "CUDA"]
    except Exception as error:  # the profiler needs rights that not every machine grants
        return [reason("kernels", error)]


def rows(
    heads: list[tuple[int, int]],
    counts: list[int],
    device: torch.device,
    model: Device | None,
    named: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields one row per product; what fails has a status that says so, and no time."""
    for (V, H), C in itertools.product(heads, counts):
        about: dict[str, Any] = {"product": "all", "C": C, "V": V, "H": H}
        try:
            for p in products(C, V, H, device):
                row = about | {"product": p.name}
                (m, k), n = p.a.shape, p.b.shape[1]
                if model:
                    row["predicted_seconds"] = gemm_ms(model, m, n, k, p.moved) / 1e3
                try:
                    row["status"] = "ok" if is_right(p) else "wrong"
                    if row["status"] == "ok":
                        row["seconds"] = measure(p.run, device, rounds=3)
                        row["tflops"] = 2e-12 * m * n * k / statistics.median(row["seconds"])
                    if named:
                        row["kernels"] = kernels(p.run)
                except Exception as error:  # this torch or GPU has no such product
                    row["status"] = reason(p.name, error)
                yield row
        except Exception as error:  # too little memory for the operands
            yield about | {"status": reason("all", error)}


def pair(text: str) -> tuple[int, int]:
    """Parses "V,H"."""
    V, H = (int(part) for part in text.split(","))
    return V, H


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemms", description=(__doc__ or "").split("\n")[0]
    )
    add_device_option(parser)
    parser.add_argument(
        "--heads", nargs="+", type=pair, metavar="V,H", help=f"(default on cuda: {HEADS})"
    )
    parser.add_argument("--rows", nargs="+", type=int, help=f"of a chunk (default on cuda: {ROWS})")
    parser.add_argument("--kernels", action="store_true", help="print their names, on cuda")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    large = device.type == "cuda"
    heads = args.heads or list(HEADS if large else TINY_HEADS)
    counts = args.rows or list(ROWS if large else TINY_ROWS)
    result: dict[str, Any] = {**header(args.device), "rows": []}
    print_header(result)
    model = device_of(result["device"])
    if model:
        print(f"x model: the time over the predicted one. {error_of_the_model()}")
    print(f"{'':20}{'C':>6}{'V':>8}{'H':>6}{'ms':>9}{'TFLOP/s':>9}{'x model':>9}")
    for row in rows(heads, counts, device, model, args.kernels and large):
        result["rows"].append(row)
        line = f"{row['product']:20}{row['C']:6}{row['V']:8}{row['H']:6}"
        if row["status"] == "ok":
            seconds = statistics.median(row["seconds"])
            line += f"{1e3 * seconds:9.4g}{row['tflops']:9.3g}"
            line += f"{seconds / row['predicted_seconds']:9.2f}" if model else ""
        else:
            line += f" {row['status']}"
        # The names' arguments and templates are long.
        names = [name.split("(")[0][:90] for name in row.get("kernels", ())]
        print(line, *names, sep="\n    ", flush=True)
        write_json(args.json, result)  # after each row: an interrupted run keeps its results


if __name__ == "__main__":
    main()
