"""The types of options are the keywords of ConversionJob, with its defaults."""

import inspect

import exl2nb as ex
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.convert_keywords import ConvertOptions, MeasureOptions


def test_convert_takes_what_the_job_takes():
    job, convert = (inspect.signature(one).parameters for one in (ConversionJob, ex.convert))
    assert convert.keys() - {"progress"} == job.keys()
    assert {name: one.default for name, one in convert.items() if name in job} == {name: one.default for name, one in job.items()}
    assert set(ConvertOptions.__annotations__) == job.keys() - {"src", "dst", "bpw"}


def test_measure_takes_what_a_measurement_depends_on():
    assert set(MeasureOptions.__annotations__) <= set(ConvertOptions.__annotations__)
    assert "effort" in inspect.signature(ex.measure).parameters
