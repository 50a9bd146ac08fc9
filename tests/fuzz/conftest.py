"""The number of inputs per fuzzer, from FUZZ_COUNT; --hypothesis-seed selects the inputs."""

import os

from hypothesis import HealthCheck, Phase, settings

FUZZ_COUNT = int(os.environ.get("FUZZ_COUNT", "100"))
settings.register_profile(
    "fuzz",
    max_examples=FUZZ_COUNT,
    deadline=None,
    database=None,  # its seed reproduces a finding, here and on any other machine
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("fuzz")
