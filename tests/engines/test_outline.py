"""An outline names what an export names, without a graph."""

import pytest

from ditto_core.errors import UsageError
from ditto_core.model.summary import outline
from ditto_core.spec import EngineSpec
from tests.models import DECODERS, conv_net, tapped_net


@pytest.mark.parametrize("source", [*DECODERS.values(), conv_net, tapped_net], ids=lambda source: source.__name__)
def test_its_sites_axes_and_outputs_are_those_of_the_export(workspace, tmp_path, source):
    spec = EngineSpec.of(source)
    whole = workspace.export(spec)
    seen = outline(workspace.model(spec.model), tmp_path, dtype="float32")
    assert (seen.finals, seen.outputs, seen.inputs, seen.vocab_size, seen.decoder) == (
        whole.finals,
        whole.outputs,
        whole.inputs,
        whole.vocab_size,
        whole.decoder,
    )
    assert seen.provenance.unmapped == whole.provenance.unmapped
    assert set(seen.provenance.sites) == set(whole.provenance.sites)  # a dropout that does nothing is an alias here
    both = [(seen.provenance.find(site), whole.provenance.find(site)) for site in whole.provenance.sites]
    assert [(a.site, a.axes, b.axes) for a, b in both if a.axes != b.axes] == []


def test_there_is_no_graph_to_cut(workspace, tmp_path):
    seen = outline(workspace.model(EngineSpec.of(DECODERS["llama"]).model), tmp_path, dtype="float32")
    assert not seen.onnx_path.exists()
    with pytest.raises(UsageError, match="this backend builds its engines from no ONNX graph"):
        seen.graph_path()
