"""Parts of pipelines that run in one process: `gpuledger demo` and `gpuledger standalone`."""
