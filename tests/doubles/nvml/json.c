#include "json.h"

#include <stdlib.h>
#include <string.h>

static Json *parse_value(const char **at);

static void skip(const char **at) {
    while (**at && strchr(" \t\r\n", **at)) ++*at;
}

static Json *fresh(int kind) {
    Json *json = calloc(1, sizeof *json);
    json->kind = kind;
    return json;
}

static char *parse_text(const char **at) {
    const char *start = ++*at;
    while (**at && **at != '"') *at += (**at == '\\' && (*at)[1]) ? 2 : 1;
    if (**at != '"') return NULL;
    char *text = malloc(*at - start + 1), *to = text;
    for (const char *from = start; from < *at; ++from) {
        if (*from == '\\') ++from; /* only \" and \\ are ever written */
        *to++ = *from;
    }
    *to = 0;
    ++*at;
    return text;
}

static int parse_members(const char **at, Json *into, char end) {
    Json **tail = &into->first;
    ++*at;
    for (skip(at); **at != end; skip(at)) {
        char *key = NULL;
        if (end == '}') {
            if (**at != '"' || !(key = parse_text(at))) return 0;
            skip(at);
            if (*(*at)++ != ':') { free(key); return 0; }
        }
        Json *member = parse_value(at);
        if (!member) { free(key); return 0; }
        member->key = key;
        *tail = member;
        tail = &member->next;
        skip(at);
        if (**at == ',') ++*at;
        else if (**at != end) return 0;
    }
    ++*at;
    return 1;
}

static Json *parse_word(const char **at) {
    static const struct { const char *word; int kind; } words[] = {
        {"null", J_NULL}, {"false", J_FALSE}, {"true", J_TRUE}};
    for (int i = 0; i < 3; ++i) {
        size_t length = strlen(words[i].word);
        if (!strncmp(*at, words[i].word, length)) { *at += length; return fresh(words[i].kind); }
    }
    return NULL;
}

static Json *parse_value(const char **at) {
    skip(at);
    Json *json;
    if (**at == '{' || **at == '[') {
        json = fresh(**at == '{' ? J_OBJECT : J_ARRAY);
        if (parse_members(at, json, **at == '{' ? '}' : ']')) return json;
        json_free(json);
        return NULL;
    }
    if (**at == '"') {
        json = fresh(J_TEXT);
        if ((json->text = parse_text(at))) return json;
        json_free(json);
        return NULL;
    }
    if (**at && strchr("-0123456789", **at)) {
        char *end;
        json = fresh(J_NUMBER);
        json->number = strtod(*at, &end);
        *at = end;
        return json;
    }
    return parse_word(at);
}

Json *json_parse(const char *text) {
    Json *json = parse_value(&text);
    skip(&text);
    if (json && *text) { json_free(json); return NULL; }
    return json;
}

void json_free(Json *json) {
    while (json) {
        Json *next = json->next;
        json_free(json->first);
        free(json->text);
        free(json->key);
        free(json);
        json = next;
    }
}

const Json *json_get(const Json *object, const char *key) {
    if (!object || object->kind != J_OBJECT) return NULL;
    for (const Json *member = object->first; member; member = member->next)
        if (!strcmp(member->key, key)) return member->kind == J_NULL ? NULL : member;
    return NULL;
}

const Json *json_at(const Json *array, int place) {
    if (!array || array->kind != J_ARRAY || place < 0) return NULL;
    const Json *member = array->first;
    while (member && place--) member = member->next;
    return member;
}

int json_length(const Json *json) {
    int length = 0;
    for (const Json *member = json ? json->first : NULL; member; member = member->next) ++length;
    return length;
}

int json_has(const Json *array, const char *text) {
    for (const Json *member = array ? array->first : NULL; member; member = member->next)
        if (member->kind == J_TEXT && !strcmp(member->text, text)) return 1;
    return 0;
}

double json_number(const Json *object, const char *key, double otherwise) {
    const Json *member = json_get(object, key);
    if (!member) return otherwise;
    return member->kind == J_NUMBER ? member->number : member->kind == J_TRUE;
}

const char *json_text(const Json *object, const char *key) {
    const Json *member = json_get(object, key);
    return member && member->kind == J_TEXT ? member->text : NULL;
}
