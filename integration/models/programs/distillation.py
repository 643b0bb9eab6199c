"""Knowledge distillation: a frozen teacher, and `compute_loss` of its own."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, images
from programs.data import predict as predicted

KERAS_LOADS = False  # Its constructor takes models, and it has no config.


def classifier(width, name):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(width, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(2, strides=1, padding="same"),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name=name,
    )


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.built = True
        self.teacher = teacher
        self.student = student

    def compile(self, optimizer, student_loss_fn, distillation_loss_fn, **kw):
        super().compile(optimizer=optimizer, **kw)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = 0.1, 10.0

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        teacher = self.teacher(x, training=False)
        hard = self.student_loss_fn(y, y_pred)
        soft = self.distillation_loss_fn(
            ops.softmax(teacher / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * hard + (1 - self.alpha) * soft

    def call(self, x):
        return self.student(x)


def make():
    keras.utils.set_random_seed(0)
    teacher = classifier(16, "teacher")
    teacher.trainable = False
    distiller = Distiller(classifier(8, "student"), teacher)
    distiller.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.KLDivergence(),
        jit_compile=JIT,
    )
    return distiller


def train(distiller):
    return fit(distiller, *images())


def predict(distiller):
    return predicted(distiller.student, images()[0])
