import pytest


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """The tiny random model of test_job.py, written once. Do not change its files: write your own with `write_model`."""
    from tests.converter.test_job import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def whole(source, tmp_path_factory):
    """Its conversion at 4 bits per weight with `OPTIONS`, in one run and in memory: other ways must write the same bytes."""
    from tests.converter.test_job import convert

    return convert(source, tmp_path_factory.mktemp("out") / "whole")
