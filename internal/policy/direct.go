// This file reads simple expressions without CEL's machinery: a field of the call, a
// member of its body, a header, path() of those. Most expressions are no more than
// that, and are read for every call.
//
// What must hold: a direct reader gives exactly the value that CEL would give, or it
// gives none, and then CEL is asked. So every error, every missing field and every
// limit is CEL's.

package policy

import (
	"net/textproto"
	"strings"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// direct gives an expression's value, or false: ask CEL.
type direct func(*call) (ref.Val, bool)

// raw gives what the call holds at one place, as it was decoded.
type raw func(*call) (any, bool)

// directOf makes a reader; nil: the expression is not simple.
func directOf(x ast.Expr) direct {
	if x.Kind() == ast.LiteralKind {
		if _, ok := x.AsLiteral().(types.String); ok {
			text := x.AsLiteral()
			return func(*call) (ref.Val, bool) { return text, true }
		}
		return nil
	}
	if x.Kind() == ast.CallKind {
		switch c := x.AsCall(); c.FunctionName() {
		case "path":
			return directPath(c)
		case "orValue":
			return directOrValue(c)
		}
	}
	read := rawOf(x)
	if read == nil {
		return nil
	}
	return func(c *call) (ref.Val, bool) {
		v, ok := read(c)
		if !ok {
			return nil, false
		}
		return plain(v)
	}
}

// plain is the CEL value of a text or a number.
func plain(v any) (ref.Val, bool) {
	switch v := v.(type) {
	case string:
		return types.String(v), len(v) <= maxText
	case intent.Number:
		return numberValue(v), true
	}
	return nil, false
}

// directText is what plainText gives of what directOf does: a text that the call holds is
// taken as it is, and needs no memory for a value of CEL's.
func directText(x ast.Expr) func(*call) (string, bool) {
	if text, ok := literalText(x); ok {
		return func(*call) (string, bool) { return text, true }
	}
	value := directOf(x)
	if value == nil {
		return nil
	}
	read := rawOf(x)
	return func(c *call) (string, bool) {
		if read != nil {
			if v, ok := read(c); ok {
				if text, ok := v.(string); ok {
					return text, len(text) <= maxText
				}
			}
		}
		v, ok := value(c)
		if !ok {
			return "", false
		}
		text, err := plainText(v)
		return text, err == nil
	}
}

// directPath is path(a, b, …) without receiver.
func directPath(c ast.CallExpr) direct {
	if c.IsMemberFunction() || len(c.Args()) == 0 || len(c.Args()) > intent.MaxSegments {
		return nil
	}
	segments := make([]func(*call) (string, bool), len(c.Args()))
	for i, arg := range c.Args() {
		if segments[i] = directText(arg); segments[i] == nil {
			return nil
		}
	}
	return func(c *call) (ref.Val, bool) {
		var texts [intent.MaxSegments]string
		for i, read := range segments {
			text, ok := read(c)
			if !ok {
				return nil, false
			}
			texts[i] = text
		}
		p, err := intent.NewPath(texts[:len(segments)]...)
		if err != nil {
			return nil, false
		}
		return pathValue{p}, true
	}
}

// directOrValue is x.?member.orValue("text").
func directOrValue(c ast.CallExpr) direct {
	if !c.IsMemberFunction() || len(c.Args()) != 1 || c.Target().Kind() != ast.CallKind {
		return nil
	}
	otherwise, ok := literalText(c.Args()[0])
	optional := c.Target().AsCall()
	if !ok || optional.FunctionName() != operators.OptSelect || len(optional.Args()) != 2 {
		return nil
	}
	member, ok := literalText(optional.Args()[1])
	of := rawOf(optional.Args()[0])
	if !ok || of == nil {
		return nil
	}
	return func(c *call) (ref.Val, bool) {
		v, ok := of(c)
		if !ok {
			return nil, false
		}
		members, ok := v.(map[string]any)
		if !ok {
			return nil, false
		}
		if v, ok = members[member]; !ok {
			return types.String(otherwise), true
		}
		return plain(v)
	}
}

func literalText(x ast.Expr) (string, bool) {
	if x.Kind() != ast.LiteralKind {
		return "", false
	}
	text, ok := x.AsLiteral().(types.String)
	return string(text), ok
}

// rawOf reads call.field and members of it; nil: it is something else.
func rawOf(x ast.Expr) raw {
	var of ast.Expr
	var name string
	switch x.Kind() {
	case ast.SelectKind:
		s := x.AsSelect()
		if s.IsTestOnly() {
			return nil
		}
		of, name = s.Operand(), s.FieldName()
	case ast.CallKind:
		c := x.AsCall()
		if c.FunctionName() != operators.Index || len(c.Args()) != 2 {
			return nil
		}
		var ok bool
		of = c.Args()[0]
		if name, ok = literalText(c.Args()[1]); !ok {
			return nil
		}
	default:
		return nil
	}
	if of.Kind() == ast.IdentKind && of.AsIdent() == "call" {
		f, ok := callFields[name]
		if !ok || x.Kind() != ast.SelectKind {
			return nil
		}
		return func(c *call) (any, bool) { return f.get(c) }
	}
	read := rawOf(of)
	if read == nil {
		return nil
	}
	if of.Kind() == ast.SelectKind && of.AsSelect().FieldName() == "header" && of.AsSelect().Operand().Kind() == ast.IdentKind {
		canonical := textproto.CanonicalMIMEHeaderKey(name)
		if strings.ToLower(canonical) != name || hiddenHeader(name) {
			return nil // CEL says what becomes of it
		}
		return func(c *call) (any, bool) { return c.oneHeader(name, canonical) }
	}
	return func(c *call) (any, bool) {
		v, ok := read(c)
		if !ok {
			return nil, false
		}
		members, ok := v.(map[string]any)
		if !ok {
			return nil, false
		}
		v, ok = members[name]
		return v, ok
	}
}
