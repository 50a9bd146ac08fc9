"""Exact amounts of money: rounding by largest remainder, minor units, text. Floats are not used.

A cost is a Fraction until the bill is written. All lines are then rounded together: the bill's sum
is rounded half to even, and each line is rounded up or down so that the lines have this sum.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

# ISO 4217 in 2026: currency codes by the number of digits of their minor unit.
_CODES: Final[Mapping[int, str]] = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    2: "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF"
    " CHF CNY COP CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD"
    " HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA"
    " MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR PLN"
    " QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TOP"
    " TRY TTD TWD TZS UAH USD UYU UZS VED VES WST XCD XCG YER ZAR ZMW ZWG",
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
_DIGITS: Final = {code: digits for digits, codes in _CODES.items() for code in codes.split()}
CURRENCIES: Final = frozenset(_DIGITS)


def minor_digits(currency: str) -> int:
    """Return the number of decimal digits of a currency's amounts, by ISO 4217."""
    return _DIGITS[currency]


def quantize_together(amounts: Sequence[Fraction], *, digits: int) -> list[Decimal]:
    """Return the amounts rounded to `digits`, so that they sum to the rounded total.

    The total is rounded half to even. Amounts with the largest remainders are rounded up, the
    others down. If remainders are equal, earlier amounts are rounded up first. The caller must
    therefore pass the amounts in a reproducible order.
    """
    scale = 10**digits
    scaled = [amount * scale for amount in amounts]
    floors = [amount.numerator // amount.denominator for amount in scaled]
    left = round(sum(scaled, Fraction(0))) - sum(floors)
    # `left` is at most the number of amounts, because rounding down reduced each by less than one
    # unit.
    by_loss = sorted(range(len(scaled)), key=lambda at: (floors[at] - scaled[at], at))
    for at in by_loss[:left]:
        floors[at] += 1
    return [Decimal(floor).scaleb(-digits) for floor in floors]


def quantize_to(total: Decimal, amounts: Sequence[Fraction], *, digits: int) -> list[Decimal]:
    """Return the amounts rounded to `digits`, so that they sum to `total`.

    The caller has rounded their sum up or down to `total`. Each amount is also rounded up or down,
    unless it already has at most `digits` decimals. If the amounts still do not sum to `total`, the
    difference is added to the first amount.
    """
    scale = 10**digits
    scaled = [amount * scale for amount in amounts]
    floors = [amount.numerator // amount.denominator for amount in scaled]
    left = int(total * scale) - sum(floors)
    lossy = [at for at, amount in enumerate(scaled) if amount != floors[at]]
    lossy.sort(key=lambda at: (floors[at] - scaled[at], at))
    raised = lossy[: max(0, left)]
    for at in raised:
        floors[at] += 1
    floors[0] += left - len(raised)
    return [Decimal(floor).scaleb(-digits) for floor in floors]


def rounded(amount: Fraction, *, digits: int) -> Decimal:
    """Return one amount rounded to `digits`, half to even."""
    return quantize_together([amount], digits=digits)[0]


def money_text(amount: Fraction | Decimal, currency: str) -> str:
    """Return an amount for display, such as `1,234.50`, with its currency's digits."""
    return f"{rounded(Fraction(amount), digits=minor_digits(currency)):,f}"


def fraction_of(number: Decimal | int | str) -> Fraction:
    """Return the exact value of a decimal number."""
    return Fraction(number)


def text_of(amount: Any, *, digits: int = 12) -> str:  # noqa: ANN401  # Fraction or Decimal
    """Return an amount as plain decimal text, without an exponent.

    A Fraction is rounded half to even to `digits`, and trailing zeros are removed.
    """
    if isinstance(amount, Decimal):
        return f"{amount:f}"
    text = f"{rounded(amount, digits=digits):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
