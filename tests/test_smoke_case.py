"""The row of test_smoke.py's checks on a GPU, without their kernels: what a CPU can run of them."""
import test_smoke


def test_the_row_of_the_gpu_checks(monkeypatch):
    """40 anchors of 15 drafts, all supervised; bf16 is near fp32, and every weight has a gradient."""
    monkeypatch.setattr(test_smoke, "GPU", "cpu")
    rows = test_smoke.dense_rows()
    hidden, loss, gradients = rows["truth"]
    hidden16, loss16, gradients16 = rows["dense"]
    assert hidden.shape == (40 * 15, 256)
    assert test_smoke.gap(hidden16, hidden) < 0.01
    assert abs(loss16 - loss) < 0.001 * loss
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert test_smoke.gap(gradients16[name], gradient) < 0.05, name
