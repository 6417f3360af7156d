import pytest
import torch


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """The tiny random model of test_job.py, written once. Do not change its files: write your own with `write_model`."""
    from tests.converter.test_conversion_job import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def whole(source, tmp_path_factory):
    """Its conversion at 4 bits per weight with `OPTIONS`, in one run and in memory: other ways must write the same bytes."""
    from tests.converter.test_conversion_job import convert

    return convert(source, tmp_path_factory.mktemp("out") / "whole")


@pytest.fixture
def weights(source):
    """Its dense weights, read as the converter reads them."""
    from exl2nb.converter.weights import DenseWeights
    from exl2nb.model.loader import read_model_config
    from exl2nb.model.store import open_store

    config = read_model_config(source)
    with open_store(config, source) as store, torch.no_grad():
        yield DenseWeights(config, store)


@pytest.fixture
def opened(tmp_path):
    """Architecture -> config and weights of a tiny random model of it."""
    from exl2nb.model.sources import ReconstructedWeights
    from exl2nb.model.store import open_store
    from tests.model.zoo import build, config_of, write

    stores = []

    def make(name):
        config = config_of(write(name, build(name), tmp_path / name))
        stores.append(open_store(config, tmp_path / name))
        return config, ReconstructedWeights(config, stores[-1].__enter__())

    yield make
    for store in stores:
        store.__exit__(None, None, None)


@pytest.fixture(scope="module")
def short_second_text():
    """Of the packaged text, which the report of a tuned model reads as well, only the beginning: to tokenise all of it takes 2 s."""
    from exl2nb.converter import calibration, pipeline

    read = pipeline.read_text

    def shortened(tokenizer, given):
        text, name = read(tokenizer, given)
        return (text[:20_000] if isinstance(given, str) and given in calibration.PACKAGED_TEXTS else text), name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "read_text", shortened)
        yield
