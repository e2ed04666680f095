// This file is about numbers in expressions. A JSON number that is an integer of
// 64 bits is CEL's int, so 10, 10.0 and 1e1 are one value; any other one is a
// number of our own, an exact decimal. No number is ever a double: a double has
// already been rounded. Arithmetic is exact or it is an error.

package policy

import (
	"fmt"
	"reflect"
	"strconv"

	"github.com/cockroachdb/apd/v3"
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

var numberType = cel.OpaqueType("number")

// number is a decimal that is not an integer of 64 bits.
type number struct{ intent.Number }

// numberValue gives the one CEL value of a number.
func numberValue(n intent.Number) ref.Val {
	if i, ok := n.Int64(); ok {
		return types.Int(i)
	}
	return number{n}
}

func (n number) ConvertToNative(to reflect.Type) (any, error) {
	if to == reflect.TypeFor[intent.Number]() {
		return n.Number, nil
	}
	return nil, fmt.Errorf("a number cannot be read as %v", to)
}

func (n number) ConvertToType(to ref.Type) ref.Val {
	switch to.TypeName() {
	case numberType.TypeName():
		return n
	case types.StringType.TypeName():
		return types.String(n.String())
	case types.TypeType.TypeName():
		return numberType
	}
	return types.NewErr("the number %s cannot be converted to %s exactly", clip(n.String()), to.TypeName())
}

func (n number) Equal(other ref.Val) ref.Val {
	o, ok := other.(number)
	return types.Bool(ok && n.Number == o.Number)
}

func (n number) Type() ref.Type { return numberType }

func (n number) Value() any { return n.Number }

// exact reads an int or a number.
func exact(v ref.Val) (intent.Number, bool) {
	switch v := v.(type) {
	case number:
		return v.Number, true
	case types.Int:
		n, err := intent.ParseNumber(strconv.FormatInt(int64(v), 10))
		return n, err == nil
	}
	return intent.Number{}, false
}

// The product of two numbers has at most this many digits. More than
// intent.Number takes is refused when the result is read back.
const maxWorkingDigits = 1024

// decimal is exact: what cannot be said in its digits is an error.
var decimal = apd.Context{
	Precision:   maxWorkingDigits,
	MaxExponent: apd.MaxExponent,
	MinExponent: apd.MinExponent,
	Traps:       apd.DefaultTraps | apd.Inexact | apd.Rounded,
}

// arithmetic makes the binding of +, - or * for numbers.
func arithmetic(ints func(a, b types.Int) ref.Val, decimals func(d, a, b *apd.Decimal) (apd.Condition, error)) func(a, b ref.Val) ref.Val {
	return func(a, b ref.Val) ref.Val {
		i, ok1 := a.(types.Int)
		j, ok2 := b.(types.Int)
		if ok1 && ok2 {
			// An overflow goes on below: the result is exact, whatever its size.
			if result := ints(i, j); !types.IsError(result) {
				return result
			}
		}
		m, ok1 := exact(a)
		n, ok2 := exact(b)
		if !ok1 || !ok2 {
			return types.NewErr("no such overload for %s and %s", a.Type().TypeName(), b.Type().TypeName())
		}
		x, _, err := apd.NewFromString(m.String())
		if err != nil {
			return types.WrapErr(err)
		}
		y, _, err := apd.NewFromString(n.String())
		if err != nil {
			return types.WrapErr(err)
		}
		// Measured first, so that 1e9999 + 1e-9999 costs nothing.
		if apart := int64(x.Exponent) - int64(y.Exponent); apart > maxWorkingDigits || apart < -maxWorkingDigits {
			return types.NewErr("the two numbers are too far apart in size to be computed with exactly")
		}
		var d apd.Decimal
		if _, err := decimals(&d, x, y); err != nil {
			return types.NewErr("the result has too many digits to be exact")
		}
		result, err := intent.ParseNumber(d.Text('E'))
		if err != nil {
			return types.WrapErr(err)
		}
		return numberValue(result)
	}
}

// compare makes the binding of an order.
func compare(holds func(sign int) bool) func(a, b ref.Val) ref.Val {
	return func(a, b ref.Val) ref.Val {
		if s, ok := a.(types.String); ok {
			if sign, ok := s.Compare(b).(types.Int); ok {
				return types.Bool(holds(int(sign)))
			}
		}
		m, ok1 := exact(a)
		n, ok2 := exact(b)
		if !ok1 || !ok2 {
			return types.NewErr("no such overload: %s and %s have no order", a.Type().TypeName(), b.Type().TypeName())
		}
		return types.Bool(holds(m.Cmp(n)))
	}
}

// redefined are the operators that this file takes over from CEL's own library,
// which knows no exact number. Division is not among them and not offered: it
// would round.
var redefined = []string{
	operators.Add, operators.Subtract, operators.Multiply,
	operators.Less, operators.LessEquals, operators.Greater, operators.GreaterEquals,
}

// numberFunctions declares the operators over exact numbers, number() and string().
func numberFunctions() []cel.EnvOption {
	add := arithmetic(func(a, b types.Int) ref.Val { return a.Add(b) }, decimal.Add)
	addAny := func(a, b ref.Val) ref.Val {
		switch a := a.(type) {
		case types.String:
			return a.Add(b)
		case traits.Lister:
			return a.Add(b)
		}
		return add(a, b)
	}
	list := cel.ListType(cel.TypeParamType("A"))
	options := []cel.EnvOption{
		// Two ints may make a number, so nothing is promised of a result.
		operator(operators.Add, addAny, cel.DynType,
			cel.Overload("add_string", []*cel.Type{cel.StringType, cel.StringType}, cel.StringType),
			cel.Overload("add_list", []*cel.Type{list, list}, list)),
		operator(operators.Subtract, arithmetic(func(a, b types.Int) ref.Val { return a.Subtract(b) }, decimal.Sub), cel.DynType),
		operator(operators.Multiply, arithmetic(func(a, b types.Int) ref.Val { return a.Multiply(b) }, decimal.Mul), cel.DynType),
		cel.Function("number",
			cel.Overload("number_string", []*cel.Type{cel.StringType}, cel.DynType),
			cel.Overload("number_int", []*cel.Type{cel.IntType}, cel.DynType),
			cel.Overload("number_number", []*cel.Type{numberType}, cel.DynType),
			cel.SingletonUnaryBinding(func(v ref.Val) ref.Val {
				text, ok := v.(types.String)
				if !ok {
					if _, ok := exact(v); !ok {
						return types.NewErr("no such overload: number(%s)", v.Type().TypeName())
					}
					return v
				}
				n, err := intent.ParseNumber(string(text))
				if err != nil {
					return types.WrapErr(err)
				}
				return numberValue(n)
			})),
		cel.Function("string",
			cel.Overload("number_to_string", []*cel.Type{numberType}, cel.StringType,
				cel.UnaryBinding(func(v ref.Val) ref.Val { return v.ConvertToType(types.StringType) })),
			cel.Overload("path_to_string", []*cel.Type{pathType}, cel.StringType,
				cel.UnaryBinding(func(v ref.Val) ref.Val { return v.ConvertToType(types.StringType) }))),
	}
	for name, holds := range map[string]func(int) bool{
		operators.Less:          func(sign int) bool { return sign < 0 },
		operators.LessEquals:    func(sign int) bool { return sign <= 0 },
		operators.Greater:       func(sign int) bool { return sign > 0 },
		operators.GreaterEquals: func(sign int) bool { return sign >= 0 },
	} {
		options = append(options, operator(name, compare(holds), cel.BoolType,
			cel.Overload(name+"string", []*cel.Type{cel.StringType, cel.StringType}, cel.BoolType)))
	}
	return options
}

// operator declares an operator over ints and numbers, and what else is given.
func operator(name string, binding func(a, b ref.Val) ref.Val, result *cel.Type, more ...cel.FunctionOpt) cel.EnvOption {
	return cel.Function(name, append(more,
		cel.Overload(name+"int", []*cel.Type{cel.IntType, cel.IntType}, result),
		cel.Overload(name+"int_number", []*cel.Type{cel.IntType, numberType}, result),
		cel.Overload(name+"number_int", []*cel.Type{numberType, cel.IntType}, result),
		cel.Overload(name+"number", []*cel.Type{numberType, numberType}, result),
		cel.SingletonBinaryBinding(binding))...)
}
