"""Edit a built ONNX Runtime engine before it is opened."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ditto_core.backends.onnxruntime import ENGINE_FILE
from ditto_core.engines.engine import MANIFEST_FILE, Engine
from ditto_core.engines.workspace import Workspace
from ditto_core.graphs.files import read_initializer


class FaultyWorkspace(Workspace):
    """A workspace whose engines all have the same fault; exports, models and healthy engines come from the cache."""

    def __init__(self, cache, fault, directory: Path):
        super().__init__(cache)
        self._fault = fault
        self._directory = directory
        self.builds = 0

    def correct(self, spec):
        """The fault is not the export's."""
        return False

    def build(self, spec, isolation=""):
        """Copy the healthy engine and edit the copy."""
        healthy = super().build(spec, isolation)
        directory = self._directory / f"engine{self.builds}"
        self.builds += 1
        shutil.copytree(healthy.directory, directory, copy_function=link)
        path = directory / ENGINE_FILE
        edit = Edit(onnx.load(str(path), load_external_data=False), directory)
        self._fault(edit)
        path.unlink()
        onnx.save(edit.model, str(path))
        engine = replace(Engine.load(directory), spec=spec)
        (directory / MANIFEST_FILE).unlink()  # a link into the cache, which names whoever built these weights first
        engine.save_manifest()
        return engine


def link(source, target):
    """Link a file, or copy it where links do not reach."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


class Edit:
    """An ONNX graph whose weights may lie outside; whatever is changed is held inside."""

    def __init__(self, model, directory):
        self.model = model
        self.graph = model.graph
        self._directory = directory
        self._count = 0

    def node(self, value):
        """Return the node that computes a value."""
        return next(n for n in self.graph.node if value in n.output)

    def upstream(self, value, kind, skip=0):
        """Return the nearest node of an operator kind that a value is computed by, breadth first."""
        waiting, seen = [value], set()
        while waiting:
            name = waiting.pop(0)
            node = next((n for n in self.graph.node if name in n.output), None)
            if node is None or node.output[0] in seen:
                continue
            seen.add(node.output[0])
            if node.op_type == kind:
                if skip == 0:
                    return node
                skip -= 1
            waiting += list(node.input)
        raise LookupError(f"no {kind} upstream of {value}")

    def array(self, name):
        """Return an initializer's values."""
        tensor = next(i for i in self.graph.initializer if i.name == name)
        return np.array(read_initializer(tensor, self._directory))

    def is_constant(self, name):
        """Tell whether a name is an initializer."""
        return any(i.name == name for i in self.graph.initializer)

    def constant(self, array):
        """Add an initializer and return its name."""
        name = self._name("constant")
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def weight_input(self, node):
        """Return the index of the input that is a floating matrix or vector, the largest one."""
        arrays = {i: self.array(n) for i, n in enumerate(node.input) if self.is_constant(n)}
        sizes = {i: array.size for i, array in arrays.items() if array.dtype.kind == "f"}
        return max(sizes, key=sizes.get)

    def change_weight(self, value, change):
        """Give the node that computes ``value`` its own, changed weight. MatMul weights are [in, out]."""
        node = self.weighted(value)
        index = self.weight_input(node)
        old = self.array(node.input[index])
        node.input[index] = self.constant(np.asarray(change(old)).astype(old.dtype))

    def weight(self, value):
        """Return the weight of the node that computes ``value``."""
        node = self.weighted(value)
        return self.array(node.input[self.weight_input(node)])

    def weighted(self, value):
        """Return the node with a weight that computes ``value``, up to reshapes and casts after it."""
        node = self.node(value)
        while node.op_type == "Add" or not any(
            self.is_constant(n) and self.array(n).dtype.kind == "f" and self.array(n).size > 1 for n in node.input
        ):
            node = self.node(node.input[0])
        return node

    def change_input(self, node, index, *nodes):
        """Compute one input of a node by other nodes: each is ``(kind, extra inputs, attributes)``, applied in turn."""
        node.input[index] = self._chain(node.input[index], nodes, before=node)

    def change_value(self, value, *nodes):
        """Compute a value anew from what the graph computes; all consumers and the tap see the changed one."""
        node = self.node(value)
        clean = self._name(f"{value}_clean")
        index = list(node.output).index(value)
        node.output[index] = clean
        after = list(self.graph.node).index(node) + 1
        last = self._chain(clean, nodes, at=after)
        made = next(n for n in self.graph.node if last in n.output)
        made.output[0] = value

    def insert_before(self, node, kind, inputs, **attributes):
        """Add a node before another and return its output's name."""
        output = self._name(kind)
        at = list(self.graph.node).index(node)
        self.graph.node.insert(at, helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def dtype(self):
        """Return numpy's dtype of the engine's floating values: that of its first output."""
        found = self.graph.output[0]
        return helper.tensor_dtype_to_np_dtype(found.type.tensor_type.elem_type)

    def scalar(self, number):
        """Add a floating scalar of the engine's dtype."""
        return self.constant(np.array(number, self.dtype()))

    def _chain(self, name, nodes, *, before=None, at=None):
        at = list(self.graph.node).index(before) if before is not None else at
        for kind, extra, attributes in nodes:
            output = self._name(kind)
            inputs = [name if item is None else item for item in extra] if None in extra else [name, *extra]
            self.graph.node.insert(at, helper.make_node(kind, inputs, [output], **attributes))
            name, at = output, at + 1
        return name

    def _name(self, stem):
        self._count += 1
        return f"{stem}__fault{self._count}"
