"""A wrong weight in engines of every kind: in the ONNX file that a backend writes, or in the module that it traces."""

import ditto_core.backends.onnx_file
from tests.faults.files import scale_weight
from tests.faults.programs import scaled_in_program


def wrong_weight(monkeypatch, site, factor):
    """Let every engine be built with a weight that is scaled; the export and the reference stay right."""
    write = ditto_core.backends.onnx_file.write_tapped

    def write_faulty(request, path, *, copy=False):
        model = write(request, path, copy=copy)
        scale_weight(path, site, factor)
        return model

    monkeypatch.setattr("ditto_core.backends.onnx_file.write_tapped", write_faulty)  # as ONNX Runtime's imports it
    monkeypatch.setattr("ditto_core.backends.openvino.write_tapped", write_faulty)
    scaled_in_program(monkeypatch, site, factor)
