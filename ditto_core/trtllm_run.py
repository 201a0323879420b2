"""``python -m ditto_core.trtllm_run``: see :mod:`ditto_core.backends.trtllm.run_command`."""

from ditto_core.backends.trtllm.run_command import main

if __name__ == "__main__":
    main()
