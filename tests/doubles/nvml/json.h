/* As much JSON as the double's description needs: a tree that is thrown away as a whole. */
#ifndef NEARKV_JSON_H
#define NEARKV_JSON_H

typedef struct Json Json;
struct Json {
    enum { J_NULL, J_FALSE, J_TRUE, J_NUMBER, J_TEXT, J_ARRAY, J_OBJECT } kind;
    double number;
    char *text;       /* of J_TEXT */
    char *key;        /* inside of an object */
    Json *first, *next;
};

Json *json_parse(const char *text); /* NULL for what is no JSON */
void json_free(Json *json);
const Json *json_get(const Json *object, const char *key);
const Json *json_at(const Json *array, int place);
int json_length(const Json *json);
int json_has(const Json *array, const char *text);
double json_number(const Json *object, const char *key, double otherwise);
const char *json_text(const Json *object, const char *key);

#endif
