"""The templates of the generated word problems, in families: the data of word_problems.py, and nothing else.

In a template {a} to {d} are 2 to 9, {B} is 11 to 40, {C} one of LARGE_NUMBERS and {D} a multiple of {a}; {n} and {m}
are names, {t} and {u} things. A one-step family holds problems of one operation: a model of 135M parameters learns
them from near zero in ten steps. The two-step families are the hard set: such a model never finds some of their
formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Template(NamedTuple):
    """A question and the calculator expression that answers it, with the same placeholders."""

    text: str
    expression: str


NAMES = (
    *("Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Jack", "Nora", "Paul", "Ella"),
    *("Max", "Ruth", "Omar", "Ivy", "Leo", "Kate", "Hugo", "Zoe", "Ali", "Eva"),
)
THINGS = ("apples", "pens", "books", "cups", "toys", "pears", "cards", "balls", "plums", "hats", "eggs", "lamps")
LARGE_NUMBERS = (100, 120, 150, 200)

_ERRANDS = (
    Template("{n} has {B} {t} and gets {a} more. How many {t} does {n} have now?", "{B}+{a}"),
    Template("{n} had {C} {t} and gave {B} of them away. How many {t} are left?", "{C}-{B}"),
    Template("There are {a} boxes with {b} {t} in each box. How many {t} are there?", "{a}*{b}"),
    Template("{D} {t} are shared equally by {a} children. How many {t} does each child get?", "{D}/{a}"),
    Template("{n} reads {B} pages every day. How many pages does {n} read in {a} days?", "{B}*{a}"),
    Template("A rope is {C} cm long and {n} cuts off {c} cm. How many cm are left?", "{C}-{c}"),
)
_KITCHEN = (
    Template("{n} bakes {B} rolls and then {a} more. How many rolls are there?", "{B}+{a}"),
    Template("A sack holds {C} kg of flour and {n} uses {B} kg. How many kg of flour are left?", "{C}-{B}"),
    Template("{n} fills {a} trays with {b} buns on each tray. How many buns are there?", "{a}*{b}"),
    Template("{n} puts {D} plums into {a} bowls, the same number in each. How many plums are in a bowl?", "{D}/{a}"),
    Template("One cake takes {B} grams of butter. How many grams do {a} cakes take?", "{B}*{a}"),
    Template("A jug holds {C} ml of milk and {n} drinks {c} ml. How many ml are left?", "{C}-{c}"),
)
_GARDEN = (
    Template("{n} picks {B} roses in the morning and {a} in the evening. How many roses is that?", "{B}+{a}"),
    Template("A garden had {C} tulips and {B} of them were cut. How many tulips are left?", "{C}-{B}"),
    Template("{n} plants {a} rows of beans with {b} beans in each row. How many beans are planted?", "{a}*{b}"),
    Template("{D} bulbs are planted in {a} equal rows. How many bulbs are in each row?", "{D}/{a}"),
    Template("A tree gives {B} kg of fruit. How many kg do {a} such trees give?", "{B}*{a}"),
    Template("A hose is {C} m long and {n} cuts off {c} m. How many m of hose are left?", "{C}-{c}"),
)
_TRIPS = (
    Template("{n} walks {B} km and then rides {a} km. How many km is that?", "{B}+{a}"),
    Template("A trip is {C} km long and {n} has done {B} km of it. How many km remain?", "{C}-{B}"),
    Template("There are {a} buses with {b} people in each bus. How many people are there?", "{a}*{b}"),
    Template("{D} people share {a} vans equally. How many people are in each van?", "{D}/{a}"),
    Template("A train goes {B} km every hour. How many km does it go in {a} hours?", "{B}*{a}"),
    Template("A tank holds {C} litres of fuel and {n} uses {c} litres. How many litres are left?", "{C}-{c}"),
)
_WORKSHOP = (
    Template("{n} saws {B} boards and then {a} more. How many boards is that?", "{B}+{a}"),
    Template("A can holds {C} ml of paint and {n} uses {B} ml. How many ml of paint are left?", "{C}-{B}"),
    Template("{n} fixes {a} shelves with {b} screws in each shelf. How many screws are used?", "{a}*{b}"),
    Template("{n} sorts {D} nails into {a} jars, the same number in each. How many nails are in a jar?", "{D}/{a}"),
    Template("One chair takes {B} minutes to paint. How many minutes do {a} chairs take?", "{B}*{a}"),
    Template("A pipe is {C} cm long and {n} cuts off {c} cm. How many cm of pipe are left?", "{C}-{c}"),
)

_SHOP = (
    Template(
        "{n} buys {a} {t} for ${b} each and pays with a ${C} bill. How many dollars does {n} get back?", "{C}-{a}*{b}"
    ),
    Template(
        "A shop sells {t} at ${b} and {u} at ${c}. {n} buys {a} {t} and {d} {u}. How much does {n} pay?",
        "{a}*{b}+{d}*{c}",
    ),
    Template(
        "{n} has ${C}. After buying {a} {t} for ${b} each, {n} finds ${c} in a pocket. "
        "How much money does {n} have now?",
        "{C}-{a}*{b}+{c}",
    ),
    Template(
        "One box holds {a} {t} and costs ${b}. How many dollars do {D} {t} cost, if only full boxes are sold?",
        "{D}/{a}*{b}",
    ),
    Template(
        "{n} sold {a} {t} in the morning and {d} in the afternoon, at ${b} each. How much did {n} earn?",
        "({a}+{d})*{b}",
    ),
    Template(
        "{t} cost ${B} each, but today each one is ${c} cheaper. How much do {a} {t} cost today?", "{a}*({B}-{c})"
    ),
)
_FARM = (
    Template(
        "{n}'s hens lay {B} eggs a day. {n} eats {c} of them and sells the others for ${a} each. "
        "How many dollars does {n} make a day?",
        "({B}-{c})*{a}",
    ),
    Template(
        "A farmer plants {a} rows with {b} {t} in each row. Rabbits eat {c} plants. How many plants are left?",
        "{a}*{b}-{c}",
    ),
    Template(
        "{n} picks {a} baskets of {t} with {b} in each and {n}'s sister picks {C}. How many {t} do they have together?",
        "{a}*{b}+{C}",
    ),
    Template(
        "{n} has {D} {t} and packs {a} into every crate. Each crate sells for ${b}. How much does {n} earn?",
        "{D}/{a}*{b}",
    ),
    Template(
        "A cow eats {a} kg of hay and a goat {c} kg of hay a day. How many kg do one cow and one goat eat in {b} days?",
        "({a}+{c})*{b}",
    ),
    Template(
        "A barn has {C} bales of hay. The animals eat {b} bales a day. How many bales are left after {a} days?",
        "{C}-{a}*{b}",
    ),
)
_TRAVEL = (
    Template(
        "A train goes {B} km an hour for {a} hours and then another {C} km by bus. How long is the trip in km?",
        "{B}*{a}+{C}",
    ),
    Template(
        "{n} drives {C} km in total. {n} has driven {b} km a day for {a} days. How many km remain?", "{C}-{b}*{a}"
    ),
    Template(
        "{n} walks {a} km every morning and {c} km every evening. How many km does {n} walk in {b} days?",
        "({a}+{c})*{b}",
    ),
    Template(
        "A car uses {a} litres of fuel for every 100 km. How many litres does it use for {b} trips of {c}00 km?",
        "{a}*{b}*{c}",
    ),
    Template(
        "A bus has {B} seats and {c} of them are broken. How many people can sit in {a} such buses?", "({B}-{c})*{a}"
    ),
    Template(
        "{D} people travel in vans that take {a} people each. A van costs ${b}. How many dollars do all the vans cost?",
        "{D}/{a}*{b}",
    ),
)
_SCHOOL = (
    Template(
        "A class has {a} tables with {b} pupils at each table, and {c} pupils are ill today. "
        "How many pupils are there today?",
        "{a}*{b}-{c}",
    ),
    Template(
        "{n} reads {a} pages every day. The book has {C} pages. How many pages are left after {b} days?",
        "{C}-{a}*{b}",
    ),
    Template(
        "A teacher shares {D} {t} equally among {a} pupils and then gives each pupil {c} more. "
        "How many {t} does each pupil have?",
        "{D}/{a}+{c}",
    ),
    Template(
        "{n} solves {a} sums a day, {m} solves {c} sums a day. How many sums do they solve together in {b} days?",
        "({a}+{c})*{b}",
    ),
    Template(
        "Each of {a} classes needs {b} red pens and {c} blue pens. How many pens do the classes need?", "{a}*({b}+{c})"
    ),
    Template(
        "{n} had {B} {t} and lost {c}. {m} has {a} times as many as {n} has now. How many {t} does {m} have?",
        "({B}-{c})*{a}",
    ),
)

ONE_STEP = ("errands", "kitchen", "garden", "trips", "workshop")
TWO_STEP = ("shop", "farm", "travel", "school")

FAMILIES: Mapping[str, tuple[Template, ...]] = MappingProxyType(
    {
        "errands": _ERRANDS,
        "kitchen": _KITCHEN,
        "garden": _GARDEN,
        "trips": _TRIPS,
        "workshop": _WORKSHOP,
        "shop": _SHOP,
        "farm": _FARM,
        "travel": _TRAVEL,
        "school": _SCHOOL,
    }
)
SETS: Mapping[str, tuple[str, ...]] = MappingProxyType({"OneStep": ONE_STEP, "TwoStep": TWO_STEP})
