"""The catalogue: a row for each schedule of the library, in a table for each tier.

A row says all but the order, which is the function that it names. `recommended` has the schedules
that a user should look at, `more` the answers to a particular need, `papers` orders to compare.
"""
