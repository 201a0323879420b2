"""``python -m ditto_core.trtllm_build``: see :mod:`ditto_core.backends.trtllm.build_command`."""

from ditto_core.backends.trtllm.build_command import main

if __name__ == "__main__":
    main()
