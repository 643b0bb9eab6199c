"""Reports of the large models of keras.applications fit on one screen.

Each on the framework that makes it soonest; what is counted is the same on all.
"""

import json

import pytest

from processes import is_installed, run

LINES = 24

REPORT = """
import json, os, sys
import keras
import keras_policy_ext as kpe

make = getattr(keras.applications, sys.argv[1])
model = make(weights=None, input_shape=(64, 64, 3), classes=10)
report = kpe.convert(model)
found = {"rows": len(report.converted) + len(report.skipped), "screens": {}}
for width in (40, 60, 80, 120, 200):
    os.environ["COLUMNS"] = str(width)
    found["screens"][width] = [str(report), str(kpe.inspect(model))]
found["full"] = len(report.table(full=True).splitlines())
print(json.dumps(found))
"""

# A backend, layers in float8, layers with a kernel, and the multiplications of
# one image of 64 × 64 pixels.
MODELS = {
    "DenseNet121": ("torch", 121, 121, "231M"),
    # Keras refuses to make this one on torch.
    "NASNetMobile": ("tensorflow", 197, 197, "45.9M"),
    "EfficientNetV2B0": ("torch", 76, 92, "59.5M"),
}


@pytest.mark.parametrize("name", MODELS)
def test_reports_of_known_models_fit_on_one_screen(name):
    backend, in_float8, layers, work = MODELS[name]
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    found = json.loads(run(backend, REPORT, name).splitlines()[-1])
    assert found["full"] > found["rows"] > 100
    for width, texts in found["screens"].items():
        for text in texts:
            lines = text.splitlines()
            assert len(lines) <= LINES
            # Narrower than this the numbers do not stand side by side.
            assert max(map(len, lines)) <= max(int(width), 55)
            said = " ".join(text.split())
            assert f"{in_float8} of {layers} layers with a kernel" in said
            assert f"{work} multiplications (MACs) per sample" in said
