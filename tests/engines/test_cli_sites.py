"""`ditto sites` lists what can be observed in a model that was never built."""

import json
import re
from pathlib import Path

import pytest

from tests.commands import ditto
from tests.models import tapped_net

MODELS = str(Path(__file__).parents[1] / "models.py")


def test_each_row_has_class_shape_and_source_line():
    done = ditto("sites", f"{MODELS}:llama", "model.layers.0.**", "model.layers.0.self_attn:probs")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows["model.layers.0.mlp.gate_proj"].split(maxsplit=2)[1] == "Linear"
    assert "[batch, length, 128]" in rows["model.layers.0.mlp.gate_proj"]
    assert "[batch, 4, length, total]" in rows["model.layers.0.self_attn:probs"]
    assert re.search(r"modeling_llama.py:\d+ forward: .*self\.gate_proj", rows["model.layers.0.mlp.gate_proj"])
    assert all(site.startswith("model.layers.0") for site in rows)


def test_json_holds_the_line_that_makes_a_tensor():
    done = ditto("sites", f"{MODELS}:tapped_net", "mlp:inter", "mlp", "--json")
    inter, mlp = json.loads(done.stdout)
    line = next(i for i, text in enumerate(Path(MODELS).read_text().splitlines(), 1) if 'tap("inter"' in text)
    assert inter["site"] == "mlp:inter"
    assert inter["shape"] == ["batch", tapped_net()[0].mlp.up.out_features]
    assert f"tests/models.py:{line} forward: " in inter["source"]
    assert (mlp["module_class"].rpartition(".")[2], mlp["shape"], mlp["dtype"]) == ("Linear", ["batch", 8], "float32")
    assert (mlp["site"], mlp["aliases"]) == ("mlp", ["mlp.down"])  # one tensor under two names


def test_tree_has_a_node_for_each_module_under_the_one_that_contains_it():
    done = ditto("sites", f"{MODELS}:llama", "--tree")
    lines = done.stdout.splitlines()
    gate = next(i for i, line in enumerate(lines) if "gate_proj" in line)
    depths = [len(re.match(r"[ │├└─]*", line)[0]) // 4 for line in lines]
    above = [max(i for i in range(gate) if depths[i] == depth) for depth in range(depths[gate])]
    assert [re.sub(r"[│├└─ ]*", "", lines[i], count=1).split()[0] for i in above] == [
        *("llama", "model", "layers", "0", "mlp")
    ]
    assert lines[above[-1]].endswith("mlp = model.layers.0.mlp.down_proj")
    assert lines[gate].endswith("gate_proj Linear [batch, length, 128]")


def test_a_model_without_code_of_its_own_has_classes_and_shapes_only():
    done = ditto("sites", f"{MODELS}:conv_net")
    assert done.stdout.splitlines()[0].split() == ["0", "Conv2d", "[batch,", "8,", "16,", "16]"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((f"{MODELS}:llama", "model.layer.*"), "selector 'model.layer.*' matches none of"),
        ((f"{MODELS}:lama",), "has no callable 'lama'; did you mean 'llama'?"),
        (("nowhere.py:model",), "nowhere.py cannot be imported: there is no such file"),
        (("./nowhere",), "model './nowhere' is not there"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, line):
    done = ditto("sites", *arguments)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
