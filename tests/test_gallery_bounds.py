"""What the gallery's benchmark counts without a GPU: bytes, instructions, what bounds a kernel."""

import torch

import htile
from benchmarks import gallery, gallery_bounds, limit
from benchmarks.gallery_bounds import Bounds, bytes_read
from htile.lower.choice.cost import H200, Cost

BF16 = torch.bfloat16


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def read(*tensors, most=1 << 60):
    return bytes_read((t, most) for t in tensors)


def test_bytes_that_are_read():
    packed = meta(8, 3, 64)
    assert read(packed) == packed.nbytes
    assert read(packed[:, 0]) == 8 * 64 * 2, "of a part of a tensor, the part"
    assert read(packed[:, 0], packed[:, 1]) == 2 * 8 * 64 * 2
    assert read(packed, packed[1:]) == packed.nbytes, "the same memory is read once"
    assert read(packed[:5], packed[3:]) == packed.nbytes
    assert read(meta(1, 64).expand(8, 64)) == 64 * 2, "what repeats is read once"
    assert read(meta(50, 64), most=100) == 100
    assert read(meta(0, 64), meta(8)) == 16


def test_a_table_is_read_as_far_as_it_is_chosen_from():
    @htile.rowwise
    def f(x, pos: htile.PerRow, table: htile.Shared):
        return x * table[pos]

    def found(rows, positions):
        args = meta(rows, 64), meta(rows, dtype=torch.int64), meta(positions, 64)
        return gallery_bounds.bounds(f, args, {}, "sm_90a")

    few, many = found(4096, 50), found(64, 1 << 20)
    assert few.read == 4096 * (128 + 8) + 50 * 128 and few.written == 4096 * 128
    assert many.read == 64 * (128 + 8 + 128)


def test_an_element_at_an_index_is_a_sector():
    @htile.rowwise
    def f(x, y: htile.PerRow, z):
        return x.sum() - z[y]

    args = meta(64, 1024), meta(64, dtype=torch.int64), meta(64, 4096)[:, :1024]
    found = gallery_bounds.bounds(f, args, {}, "sm_90a")
    assert found.read == 64 * (1024 * 2 + 8 + 32) and found.written == 64 * 4


def test_instructions_are_those_of_the_machine_code():
    def deep(x):
        for _ in range(4):
            x = torch.erf(x) + x
        return x

    light = gallery_bounds.bounds(htile.rowwise(lambda x: x + 1), (meta(8192, 4096),), {}, "sm_90a")
    heavy = gallery_bounds.bounds(htile.rowwise(deep), (meta(8192, 4096),), {}, "sm_90a")
    assert light.kind == "memory" and light.instructions < 8 and light.special == 0
    assert heavy.kind == "instructions" and 60 < heavy.instructions < 130
    assert heavy.special == 4, "an exponential in each"
    nanoseconds = heavy.instructions * 8192 * 4096 / (132 * 128 * 1.755)
    assert abs(heavy.issued / nanoseconds - 1) < 0.01


def test_waits_have_to_be_sure():
    def of(waits, issued=10.0, memory=4300):
        cost = Cost(1, 50.0, 1, 1, 1, 1, waits, 1, 100)
        return Bounds(8, memory * 50, memory * 50, 1, 0, 32, 8, issued, cost).kind

    assert 2 * 4300 * 50 / H200.memory == 100
    assert [of(124.0), of(126.0)] == ["memory", "waits"]
    assert of(10.0, issued=101.0) == "instructions"


def test_a_line_of_the_table():
    record = {
        "label": "f", "rows": 8, "us": {"kernel": 20.0, "limit": 10.0, "quack": 40.0},
        "kind": "instructions", "issued": 15.0,
        "absent": {"Liger": "", "torch.compile": "KeyError"},
    }  # fmt: skip
    said = gallery.line(record, ["torch.compile", "quack", "Liger"])
    assert said == "| f | 8 | 20.0 | 0.50 | instructions, 0.75 of it | KeyError | 0.25 |  |"
    record["kind"] = "memory"
    assert "| 0.50 | memory | KeyError |" in gallery.line(record, ["torch.compile"])


def test_every_cell_has_bytes_and_a_kind(capsys):
    gallery.main(["l2norm", "dyt", "--bounds", "--workers", "2"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and said[2].startswith("| l2norm | 262144 | 67.1 | 68.2 |")
    assert said[4].count(" by ") == len({line.split("|")[9] for line in said[2:4]})


def test_a_mix_without_triton_is_a_copy():
    (found,) = limit.of_mix(4096, 1024, torch.device("cpu"))
    found.call()
    assert found.right() and found.name == "copy_ of as many bytes"
