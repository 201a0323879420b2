"""Steps handed from thread to thread: nothing is handed over that the GPU may still be writing."""

import threading

from ditto_core.backends.served import forcing
from ditto_core.backends.served import session as served
from ditto_core.backends.served.handoff import Handoff
from ditto_core.backends.trtllm import session


def test_each_thread_waits_for_its_own_work_before_the_other_goes_on():
    seen = []

    def settle():
        seen.append(("settled", threading.current_thread() is main))

    def run():
        for step in range(2):
            seen.append(("wrote", False))
            orders.append(handoff.offer(step))

    main, orders, handoff = threading.current_thread(), [], Handoff(settle)
    handoff.start(run)
    assert handoff.step() == 0
    seen.append(("read", True))
    assert handoff.step("go on") == 1
    handoff.stop()
    assert orders == ["go on", None]
    assert seen == [
        *(("wrote", False), ("settled", False)),
        *(("read", True), ("settled", True)),
        *(("wrote", False), ("settled", False)),
    ]


def test_with_a_gpu_the_whole_device_is_waited_for(monkeypatch):
    """The run's stream is not known: TensorRT-LLM makes its own."""
    waited = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waited.append(True))
    forcing.settle()
    assert waited == [True]
    assert served.settle is forcing.settle
    assert session.settle is forcing.settle
