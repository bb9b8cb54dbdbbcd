"""The public names, and that they all resolve."""

import splitroll


def test_public_names_are_these() -> None:
    assert set(splitroll.__all__) == {
        "__version__",
        "Activity",
        "Answer",
        "BlockingRollout",
        "Config",
        "ConfigError",
        "Environment",
        "EnvironmentFactory",
        "Episode",
        "EpisodeGroup",
        "FailedGroup",
        "Group",
        "GroupFailed",
        "InvalidRequest",
        "Prompt",
        "Rollout",
        "Route",
        "Sample",
        "SamplingParams",
        "SplitrollError",
        "Timing",
        "load_config",
    }


def test_public_names_resolve() -> None:
    for name in splitroll.__all__:
        assert getattr(splitroll, name) is not None
