"""Lossy compression of lists of variables: whose residual is whose."""

from __future__ import annotations

from hvdlite.compression.topk import TopK
from hvdlite.gradients.lossy import Stores


class Variable:
    """A variable as Keras and TensorFlow have them."""

    dtype, shape = "float32", (64, 32)

    def __init__(self, value: object = None) -> None:
        self.name = "w"
        self._value = value

    def assign(self, value: object) -> None:
        self._value = value


def test_a_new_variable_does_not_get_the_number_of_a_dead_one() -> None:
    stores = Stores(TopK())
    ids, numbers = set(), set()
    for _ in range(50):
        variable = Variable()
        ids.add(id(variable))
        numbers.add(stores.number(variable))
        del variable
    assert len(ids) < 50, "Python gave no id twice: this test shows nothing"
    assert numbers == set(range(50))


def test_a_variable_keeps_its_number_when_it_gets_another_value() -> None:
    stores, variable = Stores(TopK()), Variable([1.0])
    stores.number(Variable())
    before = stores.number(variable)
    variable.assign([2.0])
    assert stores.number(variable) == before == 1


def test_a_keras_variable_has_the_number_of_the_frameworks_variable_inside_it() -> None:
    stores, inner = Stores(TopK()), Variable()
    assert stores.number(Variable(inner)) == stores.number(inner) == 0


def test_names_are_of_one_variable_each() -> None:
    stores, variables = Stores(TopK()), [Variable(), Variable()]
    assert stores.names(variables) == ("0 w", "1 w")
    assert stores.names(variables[::-1]) == ("1 w", "0 w")
    assert Stores(None).names(variables) == ()
